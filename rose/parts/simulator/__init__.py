"""A discrete-event simulation of a cluster. It drives the same `rose.scheduler.Scheduler` as a
live run.

The package may import `rose.scheduler`, `rose.config`, `rose.parts.simulator.traces`, numpy and the
pure rules of `rose.parts.lending`; never torch, vLLM or MPI. It doesn't depend on Hydra: it takes a
`Spec` and returns a `Result`, which is the same for the same seed.
"""
