"""One borrowed rank: it waits for a run, joins it, takes turns with an engine of its own and leaves.

`job` is the Slurm job by which a run asks for one. May import `rose.engine`, `rose.comm` and
`rose.launch`.
"""
