"""From a configuration to running ranks: plan (pure), run folder and resume rules, mpiexec, supervision.

May import `rose.config`, `rose.protocol` and, for what the user sees, `rose.observe`. Must never know what
a rank does: it starts `rose.main`, watches processes, and ends them. `guard`, `logs`, `orphan` and
`rank_status` run inside the ranks too and import nothing heavy.
"""
