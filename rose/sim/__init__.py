"""A simulated cluster, by discrete events, that drives the very `rose.scheduler.Scheduler` of a
live run.

May import `rose.scheduler`, `rose.config`, `rose.sim.traces`, numpy and the pure rules of
`rose.lending`; never torch, vLLM or MPI. Knows nothing of Hydra: a `Spec` comes in, a `Result`
goes out, the same for the same seed.
"""
