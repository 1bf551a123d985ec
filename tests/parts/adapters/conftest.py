"""Servers of other packages; and the fixtures of tests/agent, on whose loop and templates the
adapters' tests rest."""

import socket
import subprocess
from contextlib import contextmanager

from tests import processes
from tests.agent.conftest import chats, save_tokenizer, tokenizer  # noqa: F401
from tests.ports import free_port


@contextmanager
def served(*program, **options):
    """The port of a server that runs as `program PORT`."""
    port = free_port()
    process = subprocess.Popen([*map(str, program), str(port)], **options)

    def answers():
        assert process.poll() is None, "the server has ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        processes.until(answers, "the server")
        yield port
    finally:
        process.kill()
        process.wait()
