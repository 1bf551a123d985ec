"""The part's kind of Slurm job."""

from rose.launch import lent

JOBS = {lent.REWARDS: "rose.parts.rewards.job"}
