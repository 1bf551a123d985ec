"""The command of this part."""

COMMANDS = {"play": "rose.parts.play"}
