"""The rules by which rollouts run beside users' requests: latency targets, predicted step times,
gate and memory budget. Pure: numbers in, decisions out; the simulator uses them too.

This package may import `rose.config` and the boards' records in `rose.parts.lending.board`, but
neither vLLM nor torch.
"""
