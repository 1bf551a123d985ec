"""Replicas of the model train a part of each step on the devices of engines that sleep meanwhile
(trainer.elastic_replicas, Libra's mechanism).

`division` is the coordinator's side, `rollout_worker` the rollout rank's, `process` and `replica`
are the process beside an engine. The trainer ranks add the `gradients` that it wrote to a file. The
messages between them are in rose/protocol.py.
"""
