"""`rose doctor` tries what ROSE needs of a machine or cluster, and gives a `Finding` per
part.

`machine`, `slurm` and `join` are the parts; `all_reduce`, `rank`, `host` and `joiner` are the
programs that they start elsewhere. May import `rose.config`, `rose.launch`, `rose.comm` and the
coordinator's half for borrowed ranks (`rose.coordinator.borrowed`); nothing imports it.
"""
