"""vLLM behind a small interface (start, generate, abort, load_version, stats, shutdown), its
returnable KV memory, and the rollout rank around it (`rank`).

It may import `rose.config`, `rose.comm`, `rose.observe` and `rose.transfer`; it knows nothing of
the scheduler, the trainer or lending. Importing this package imports neither vLLM nor torch.
"""
