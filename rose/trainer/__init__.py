"""The training half: a batch of trajectories in, a policy version out, on DeepSpeed.

May import protocol, config, transfer and observe; never MPI, vLLM or the coordinator. The
coordinator uses `batching` and `checkpoint`, too, so these and this package import no torch.
"""
