"""Seeing a run: events and metrics as files, and everything that is drawn from those files.

The ranks write (`recorder`, `metrics`, `status`); `trace`, `report` and `terminal` only read: a run
can be looked at while it runs, after it crashed, or elsewhere. Knows nothing of MPI, vLLM or torch.
"""
