"""Environments whose episodes run in sandboxes, one file each (`rose.agent.envs`)."""
