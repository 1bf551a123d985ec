"""A wrapper of vLLM with a small interface (start, generate, abort, load_version, stats, shutdown),
and the rollout rank that owns it (`rank`). An engine can release its memory and take it again.

This package may import `rose.config`, `rose.comm`, `rose.observe` and `rose.transfer`; it knows
nothing of the scheduler, the trainer or lending. Importing it imports neither vLLM nor torch.
"""
