"""vLLM behind a small interface (start, generate, abort, load_version, stats, shutdown), the KV
memory that it can give back, its drafts, and the rank around it (`rank`).

May import `rose.config`, `rose.comm`, `rose.observe` and `rose.transfer`; knows nothing of the
scheduler, the trainer or lending. Importing this package imports neither vLLM nor torch.
"""
