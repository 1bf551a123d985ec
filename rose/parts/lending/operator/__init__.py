"""The process that operates a lent device: the online server, the operator's switch, report and
metrics.

This package may import `rose.parts.lending.rules`, `board`, `rose.engine` and `rose.launch`.
"""
