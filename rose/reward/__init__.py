"""The episode that a reward scores, its score, and a user's function that returns one.

May import `rose.config` and `rose.inputs`. Rewards that the run itself computes, other than those
of its environments, are a part (rose/parts/rewards).
"""
