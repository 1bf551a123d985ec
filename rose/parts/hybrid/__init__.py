"""Engines on the trainer's devices that roll out while the trainer would idle (rollout.hybrid).

`hybrid_devices` moves the devices between the trainer and these engines as the scheduler orders.
`hybrid_starts` decides whether an engine that died starts again. A run without rollout.hybrid needs
neither.
"""
