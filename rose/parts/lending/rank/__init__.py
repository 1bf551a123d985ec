"""A borrowed rank: waits for a run, joins it, serves turns with its own engine, and leaves.

`job` is the Slurm job by which a run requests a borrowed rank. This package may import
`rose.engine`, `rose.comm` and `rose.launch`.
"""
