"""What each rank runs: one module per role, and the coordinator's two halves (turns, steps).

Sits on top of everything else; nothing imports it but `rose.main`. The coordinator wires the parts,
the parts don't know it.
"""
