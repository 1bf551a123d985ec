"""vLLM behind a small interface: start, generate, abort, load_version, stats, shutdown.

May import `rose.protocol`, `rose.config` and `rose.transfer`; knows nothing of MPI, the scheduler
or the trainer. Importing this package imports neither vLLM nor torch.
"""
