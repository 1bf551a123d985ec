"""The parts of lending that run inside vLLM: the schedulers of a device's online and rollout
engine, and the KV memory that these engines exchange. May import `rose.parts.lending.rules` and
`rose.engine`.
"""
