"""When rollouts may run beside users' requests: latency targets, predicted step times, gate and
memory budget. Pure: numbers in, decisions out; the simulator uses them too.

May import `rose.config` and the boards' records in `rose.lending.board`; never vLLM or torch.
"""
