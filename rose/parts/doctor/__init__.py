"""`rose doctor` checks a machine or cluster for everything that ROSE needs. Each check gives a
`Finding`.

`machine`, `devices`, `slurm` and `join` have the checks, which start the programs `all_reduce`,
`rank`, `host` and `joiner`. May import `rose.config`, `rose.launch`, `rose.comm` and the
coordinator's side of borrowing (`rose.coordinator.borrowed`); nothing imports it.
"""
