"""Environments of text tasks, one file each (`rose.agent.envs`)."""
