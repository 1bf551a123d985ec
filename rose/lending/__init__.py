"""Lending idle serving GPUs to a training run without hurting who is served on them.

`rules` decide, `vllm` carries it out inside the two engines of a device, `operator` runs the online
server and its switch, `rank` is the engine that joins a run; `board` is the shared memory between
them, and `profile` measures a device. `python -m rose.serving` is the command.
"""
