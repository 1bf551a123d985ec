"""Episodes, their scores, and the loading of a user's function, such as one that scores episodes.

This package may import `rose.config` and `rose.inputs`. The part rose/parts/rewards computes
rewards other than the environments' own, or adds to these.
"""
