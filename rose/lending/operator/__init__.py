"""A device that serves users and lends: the online server, the operator's switch, report and metrics.

May import `rose.lending.rules`, `board`, `rose.engine` and `rose.launch`.
"""
