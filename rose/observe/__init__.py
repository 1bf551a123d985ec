"""Observe a run: events and metrics as files, and the terminal's view of them.

The ranks write (`recorder`, `metrics`, `status`). `terminal` and the part `report` only read: a run
can be viewed while it runs, after it crashed, or elsewhere. Nothing here knows MPI, vLLM or torch.
"""
