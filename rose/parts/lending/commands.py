"""The command of this part, its kind of Slurm job, and the keys of its command line."""

from rose.launch import lent

COMMANDS = {"serve": "rose.parts.lending.serve"}
JOBS = {lent.ENGINES: "rose.parts.lending.rank.job"}
KEYS = {"serving.online": "serve", "serving.lending": "serve"}
