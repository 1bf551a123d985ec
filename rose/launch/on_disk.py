"""Estimate what a run writes into its folder, in bytes and files, since quotas count both. Pure.

A checkpoint holds 12 bytes for each trained parameter (Adam's two moments and the master weights,
in fp32) and the weights in their dtype, which ZeRO stage 3 doesn't save. One trainer rank writes
nine files, and each further rank four. The last trainer.checkpoint_keep checkpoints stay until the
next one is complete. A trajectory takes `TOKEN` bytes a token: its id, whether the policy generated
it, its log-probability and its version. Left out: the journal, the events, and versions that hold
only changes of the weights. Their sizes depend on the run (`rose state` shows them).
"""

from __future__ import annotations

from typing import NamedTuple

from rose.config import Config, ModelShape
from rose.launch.memory import BYTES, trained
from rose.observe.disk import size

TOKEN = 13  # bytes of a token in rollouts/


class OnDisk(NamedTuple):
    checkpoint: int  # bytes of a checkpoint
    files: int  # files of a checkpoint
    checkpoints: int  # the most checkpoints that exist at once
    version: int  # bytes of a whole version of the weights
    step: int  # bytes of a step's trajectories if each fills its context

    def __str__(self) -> str:
        return (
            f"on disk, about: {self.checkpoints} checkpoints of {size(self.checkpoint)} and "
            f"{self.files} files each; {size(self.version)} for each whole version of the weights; "
            f"at most {size(self.step)} of trajectories a step"
        )


def of(c: Config, shape: ModelShape) -> OnDisk:
    """Return the estimate for the file system of the run's folder."""
    trainer, elements = c.trainer, trained(c, shape)
    weights = BYTES[trainer.dtype] if trainer.zero_stage < 3 else 0
    return OnDisk(
        checkpoint=(12 + weights) * elements,
        files=5 + 4 * trainer.ranks,
        checkpoints=trainer.checkpoint_keep + 1,
        version=BYTES[c.model.dtype] * elements,
        step=TOKEN * trainer.batch_size * c.model.max_context if c.observe.save_trajectories else 0,
    )
