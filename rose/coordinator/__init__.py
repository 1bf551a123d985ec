"""The coordinator: step loop, turns, groups, borrowed ranks, provisioner and journal.

One rank without a GPU. It wires the parts, which don't know it; only `rose.main`, the front door
and the doctor import it.
"""
