"""Rewards that the run computes itself, beside its rollouts; with reward=environment it needs none.

`scorers` has the kinds of reward. `reward_rank` is the run's rank with a pool of workers, and
`worker` is the program of each worker. `reward_jobs` requests Slurm jobs with further workers.
"""
