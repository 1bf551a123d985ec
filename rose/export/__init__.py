"""Export a run's policy as a Hugging Face folder, equal bit for bit to the engines' weights at that
step. `weights` finds and reads the weights, `folder` writes the folder, `card` its model card.

May import config, models, transfer, the trainer's checkpoints and observe; uses no MPI, no vLLM, no
GPU.
"""
