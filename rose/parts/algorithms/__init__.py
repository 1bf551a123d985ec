"""RL algorithms besides GRPO, the default run's, one file each.

Like those of `rose.trainer.algorithms`, they know nothing of ranks, engines or DeepSpeed, and
import torch in their functions only. docs/algorithms.md says what each is for.
"""
