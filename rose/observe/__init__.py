"""Observe a run: events and metrics as files, and all views that are drawn from those files.

The ranks write (`recorder`, `metrics`, `status`). `trace`, `report` and `terminal` only read: a run
can be viewed while it runs, after it crashed, or elsewhere. Nothing here knows MPI, vLLM or torch.
"""
