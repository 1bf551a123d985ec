"""The command of this part."""

COMMANDS = {"doctor": "rose.parts.doctor"}
