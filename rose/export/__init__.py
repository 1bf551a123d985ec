"""Policy out: a Hugging Face folder of a run's weights, equal bit for bit to what the engines had
at that step. `weights` finds and reads them, `folder` writes, `card` tells where they come from.

May import config, models, transfer, the trainer's checkpoints and observe; knows no MPI, no vLLM,
no GPU.
"""
