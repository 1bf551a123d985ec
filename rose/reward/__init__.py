"""Rewards that take time, computed beside the rollouts: scorers, and the elastic pool of workers
that runs them.

May import `rose.config`, `rose.comm`, `rose.protocol` and the modules below them; must know nothing
of engines, turns or training. `rank.py` is the role, `worker.py` the program of each worker.
`job.py` submits Slurm jobs with further workers.
"""
