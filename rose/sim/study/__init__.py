"""Questions to the simulator, and their answers: what is gained over which rival, over a sweep,
with how many GPUs.

A checked `Config` becomes `rose.sim.Spec`s and schedulers (`build`), runs over systems and seeds
(`runs`), and their outcomes tables, pages and files. May import rose.config, rose.scheduler,
rose.sim and rose.observe; never torch, vLLM or MPI, so that it answers on any laptop.
"""
