"""Environments that run other frameworks' tasks, one file each (`rose.agent.envs`)."""
