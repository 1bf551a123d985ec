"""A discrete-event simulation of a cluster. It drives the same `rose.scheduler.Scheduler` as a
live run.

`driver.simulate` takes a `spec.Spec` and returns a `result.Result`, which is the same for the same
seed. The package imports neither torch, vLLM, MPI nor Hydra.
"""
