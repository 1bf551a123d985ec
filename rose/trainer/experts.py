"""The experts of a mixture, as transformers holds them and as the model's folder has them.

transformers keeps all experts of a layer in two parameters, `mlp.experts.gate_up_proj` (experts, 2
x width, hidden), gate before up, and `mlp.experts.down_proj` (experts, hidden, width). A model's
folder and a policy version have one matrix for each expert and projection. So each matrix can be
published as a block of its own. A matrix's values are contiguous in the parameter.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_FUSED = re.compile(r"(.+\.mlp\.experts\.)(gate_up_proj|down_proj)")
_OWN = re.compile(r"(.+\.mlp\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


class Part(NamedTuple):
    """A tensor of the model's folder, as a part of one of transformers' parameters."""

    name: str  # the tensor's name in the model's folder
    shape: tuple[int, ...]
    start: int  # flat index of its first value within the parameter


def parts(name: str, shape: tuple[int, ...]) -> list[Part]:
    """List the folder's tensors in a parameter, in order: the experts' matrices, or for any other
    parameter itself."""
    match = _FUSED.fullmatch(name)
    if match is None:
        return [Part(name, shape, 0)]
    prefix, fused = match.groups()
    experts, rows, columns = shape
    kinds = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
    own = (rows // len(kinds), columns)
    names = [f"{prefix}{expert}.{kind}.weight" for expert in range(experts) for kind in kinds]
    return [Part(each, own, i * math.prod(own)) for i, each in enumerate(names)]


def parameter_of(name: str, shape: tuple[int, ...]) -> tuple[str, int]:
    """Return which of the trainer's parameters holds the tensor `name` of the model's folder, and
    the flat index in the parameter at which the tensor begins. The inverse of `parts`."""
    match = _OWN.fullmatch(name)
    if match is None:
        return name, 0
    prefix, expert, kind = match[1], int(match[2]), match[3]
    if kind == "down_proj":
        return f"{prefix}down_proj", expert * math.prod(shape)
    return f"{prefix}gate_up_proj", (2 * expert + (kind == "up_proj")) * math.prod(shape)
