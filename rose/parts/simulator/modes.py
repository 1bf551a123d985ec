"""The modes of `python launch.py` that simulate a cluster (`rose.extensions` finds them)."""

from __future__ import annotations

from rich.console import Console

MODES = ("simulate", "plan")
GROUPS = ("sim=default",)
SECTION = "sim"


def main(trees: list[dict], console: Console, command: str) -> int:
    """Simulate the composed trees of one command line: each is a point of a sweep. Return the exit
    code. Raises `rose.config.ConfigError`."""
    from rose.launch import model
    from rose.parts.simulator import config
    from rose.parts.simulator.study import front

    return front.main([model.known(config.from_dict(tree)) for tree in trees], console, command)
