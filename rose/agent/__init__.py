"""The environment host: it owns trajectories, runs the agent loop on an environment (`envs`), and
requests one turn at a time from the coordinator. It never imports an engine or the trainer.
"""
