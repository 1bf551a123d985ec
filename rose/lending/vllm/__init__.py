"""What runs inside vLLM: the schedulers of the online and the rollout engine of a device, and the KV
memory that they hand to each other. May import `rose.lending.rules` and `rose.engine`.
"""
