"""The environment host: it owns trajectories, runs the agent loop on an environment (`envs`), and
asks the coordinator for one turn at a time. May import protocol, config, comm and observe; never an
engine or the trainer.
"""
