"""The algorithms of this part, by the names that `algorithm.name` has (rose/extensions.py)."""

from rose.parts.algorithms.dapo import Dapo
from rose.parts.algorithms.decoupled_ppo import DecoupledPpo
from rose.parts.algorithms.gspo import Gspo
from rose.parts.algorithms.reinforce_pp import ReinforcePP
from rose.parts.algorithms.rloo import Rloo
from rose.parts.algorithms.tree_grpo import TreeGrpo
from rose.parts.algorithms.turn_grpo import TurnGrpo

ALGORITHMS: dict[str, type] = {
    "turn_grpo": TurnGrpo,
    "tree_grpo": TreeGrpo,
    "dapo": Dapo,
    "rloo": Rloo,
    "reinforce_pp": ReinforcePP,
    "gspo": Gspo,
    "decoupled_ppo": DecoupledPpo,
}
