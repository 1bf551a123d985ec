"""The command of this part."""

COMMANDS = {"show": "rose.parts.report.show"}
