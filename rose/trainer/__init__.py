"""The training half: a batch of trajectories in, a policy version out, on DeepSpeed.

May import protocol, config, transfer and observe; never MPI, vLLM or the coordinator. `batching`
and `checkpoint`, which the coordinator uses too, import no torch; nor does importing this package.
"""
