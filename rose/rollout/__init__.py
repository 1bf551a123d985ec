"""Rollout in four stages, one module each: generate, filter, control, replay; and the agent loop.

`generate` and the agent loop run on environment hosts; `control`, `filter`, `replay` and the ledger
of turns in the coordinator. May import protocol, config, envs, observe; never an engine or the
trainer.
"""
