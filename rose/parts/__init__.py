"""The parts: folders with what a training run can do without.

Each says in its `__init__` what it is. The core never imports a part by its name, so any of these
folders may be removed. `rose.extensions` finds what they add, by the names of their modules.
"""
