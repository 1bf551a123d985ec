"""Two engines on one device: the online engine S, whose users must notice nothing, and the rollout
engine R.

Pure rules (slo, predictor, gate, budget), the state that both engines publish in shared memory
(board), and vLLM schedulers that follow the rules (online, rollout). Commands and servers are in
rose.serving.
"""
