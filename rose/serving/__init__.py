"""The serving side: ranks of serving jobs that join a running training job and leave again.

`python -m rose.serving` is the operator's command; `member` is one membership, in a process of its own.
"""
