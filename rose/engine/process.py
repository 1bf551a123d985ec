"""What keeps engine processes from outliving their rank, under the name by which the engine's modules import it."""

from rose.processes import die_with_parent

__all__ = ["die_with_parent"]
