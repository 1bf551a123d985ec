"""Studies with the simulator: comparisons of systems, sweeps, and the search for a number of GPUs.

`build` turns a checked `Config` into `spec.Spec`s and schedulers, `runs` simulates all systems and
seeds, and the other modules turn the outcomes into tables, pages and files. The package imports
neither torch, vLLM nor MPI, so that it runs on any laptop.
"""
