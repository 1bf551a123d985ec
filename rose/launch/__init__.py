"""Turn a configuration into running ranks: plan (pure), run folder and resume rules, mpiexec, Slurm
and supervision.

This package starts `rose.main`, watches the processes and ends them, without knowing what a rank
does. `guard`, `layout`, `logs`, `rank_status` and `resume` run inside the ranks too. `rose.front`
asks each package whether its part of the configuration can work.
"""
