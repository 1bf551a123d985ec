"""Studies with the simulator: comparisons of systems, sweeps, and the search for a number of GPUs.

`build` turns a checked `Config` into `rose.parts.simulator.Spec`s and schedulers, `runs` simulates
all systems and seeds, and the other modules turn the outcomes into tables, pages and files. The
package may import rose.config, rose.scheduler, rose.parts.simulator and rose.observe; never torch,
vLLM or MPI, so that it runs on any laptop.
"""
