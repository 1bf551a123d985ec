"""From a configuration to running ranks: plan (pure), run folder and resume rules, mpiexec,
supervision.

`front` asks each package whether its part of the configuration can work (envs, scheduler,
trainer.algorithms, rollout.replay) and shows the run with `rose.observe`; nothing else here imports
more than `rose.config`, `rose.protocol`, `rose.models` and `rose.processes`. None of it knows what
a rank does: it starts `rose.main`, watches processes, and ends them. `guard`, `layout`, `logs`,
`rank_status` and `resume` run inside the ranks too.
"""
