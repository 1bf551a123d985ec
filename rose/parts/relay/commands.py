"""The command of this part."""

COMMANDS = {"relay": "rose.parts.relay"}
