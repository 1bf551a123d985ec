"""An MCP server of the official SDK: stdio, or streamable HTTP on the port given."""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums", log_level="ERROR")
total = 0


@server.tool()
def add(number: int) -> str:
    """Add to the running total."""
    global total
    total += number
    return str(total)


@server.tool()
def divide(by: int) -> str:
    """Divide a hundred."""
    return str(100 / by)


@server.tool()
def crash() -> str:
    """End the server."""
    import os

    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
