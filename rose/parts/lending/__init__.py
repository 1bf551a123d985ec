"""Lending idle serving GPUs to a training run within the latency targets of the users served there.

`rules` decide, `vllm` carries the decisions out inside the two engines of a device, `operator` runs
the online server and its switch, and `rank` is the rollout engine that joins a run. These processes
exchange their states through shared memory (`board`). `profile` measures a device. The command is
`rose serve`.
"""
