"""Turn a configuration into running ranks: plan (pure), run folder and resume rules, mpiexec, Slurm
and supervision.

Nothing here knows what a rank does: it starts `rose.main`, watches the processes, and ends them.
`guard`, `layout`, `logs`, `rank_status` and `resume` run inside the ranks too. The front door,
`rose.front`, asks each package whether its part of the configuration can work.
"""
