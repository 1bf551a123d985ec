"""A trainer rank of a `tiny_world` job: the actions of the job, and what is watched of each."""

from __future__ import annotations

import functools
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import deepspeed
import numpy as np
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from msgspec.structs import replace
from transformers.integrations import deepspeed as hf_deepspeed

from rose import protocol as p
from rose.comm.address import local_place
from rose.config import read_shape
from rose.engine import layout
from rose.launch import rank_status
from rose.observe.recorder import NullRecorder
from rose.trainer import deepspeed_engine, segments
from rose.trainer.algorithms import build
from rose.trainer.step import TrainingDiverged
from rose.trainer.trainer import Trainer
from rose.trainer.watch import Watch
from tests.trainer import tiny_world
from tests.trainer.tiny_world import make_batch, make_forked, plan


def weights(trainer) -> dict:
    zero = trainer.engine.settings.zero_stage
    return {
        name: (safe_get_full_fp32_param(p) if zero else p).detach().clone().float().numpy()
        for name, p in trainer.engine.policy.named_weights()
    }


def states(trainer) -> dict:
    """Float32 weights and Adam's two moments, whole, under ZeRO."""
    zero = trainer.engine.engine.optimizer
    if trainer.engine.settings.zero_stage < 3:
        zero._lazy_init_hp_params_optimizer_state()
    return weights(trainer) | {
        f"{name} {moment}": safe_get_full_optimizer_state(p, moment).numpy()
        for name, p in trainer.engine.policy.named_weights()
        for moment in ("exp_avg", "exp_avg_sq")
    }


def watch_gradients(trainer, found: list) -> None:
    """Each update's whole gradient, as it is applied but for clipping: parameter -> array."""
    update, zero = trainer.engine._update, trainer.engine.settings.zero_stage

    def watched(stepped):
        scale = trainer.engine.engine.optimizer.loss_scale if zero else 1.0
        gradient = {
            name: ((safe_get_full_grad(p) if zero else p.grad) / scale).float().numpy()
            for name, p in trainer.engine.policy.named_weights()
        }
        found.append(gradient)
        return update(stepped)

    trainer.engine._update = watched


def limits_s() -> list[float]:
    """Seconds that a collective of each process group may take."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups
    ]


def watch_merging(found: list[int]) -> None:
    """Bytes of values that transformers makes of a folder's tensors as it reads a model under
    ZeRO-3."""
    convert = hf_deepspeed._apply_weight_conversions_to_state_dict

    def watched(model, stored, how):
        given = set(map(id, stored.values()))
        made = convert(model, dict(stored), how)
        found.extend(t.nbytes for t in made.values() if id(t) not in given and not t.is_meta)
        return made

    hf_deepspeed._apply_weight_conversions_to_state_dict = watched


def watch_second_copies(trainer, found: list[int]) -> None:
    """Bytes of this rank's second copy of the weights (trainer.hpz) before each update."""
    update = trainer.engine._update

    def watched(stepped):
        every = trainer.engine.policy.parameters()
        parts = (getattr(parameter, "ds_secondary_tensor", None) for parameter in every)
        found.append(sum(part.nbytes for part in parts if part is not None))
        return update(stepped)

    trainer.engine._update = watched


# of DeepSpeed's, in elements: else ZeRO-3 gathers all of the tiny model and keeps it
LARGE = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 20_000}
LARGE |= {"stage3_prefetch_bucket_size": 10_000}


def keep_gathered(below: int, more: dict[str, int]) -> None:
    """Parameters of fewer elements are those that ZeRO-3 keeps from one pass to the next; `more` of
    its settings."""
    make = deepspeed_engine.zero_config

    def made(*args):
        config = make(*args)
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": below} | more
        return config

    deepspeed_engine.zero_config = made


def compilations() -> int:
    """Functions that torch has compiled in this process, each form once."""
    import torch._dynamo

    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def forms(trainer) -> list[int]:
    """Count the forms of a layer's code, and of the head's, that torch has compiled here."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    policy = trainer.engine.policy
    functions = (type(policy.hf.base_model.layers[0]).forward, type(policy.head)._chunk)
    return [len(_debug_get_cache_entry_list(function.__code__)) for function in functions]


def watched(trainer, folder: Path, rank: int, beat_s: float):
    """Return the `Watch` of a rank of a run in `folder`."""
    who = {"rank": rank, "role": p.Role.TRAINER, "index": rank, "host": "here"}
    who |= {"pid": os.getpid(), "guard_pid": os.getppid()}
    rank_status.write(folder, 1, rank_status.RankStatus(**who, state="running"))
    report = functools.partial(rank_status.mark_begun, folder, 1, rank, beat_s=beat_s)
    return Watch(beat_s, trainer.progress, report)


def publish_beside(trainer, store: Path, cuts):
    """A publisher of the same weights that keeps a copy of the last version."""
    publisher = trainer._publisher
    with mock.patch.object(type(trainer.config), "compares_updates", False):
        trainer.open_store(store, cuts)
    trainer._publisher, publisher = publisher, trainer._publisher
    assert publisher._updates is None
    return publisher


class Rank:
    """A trainer rank of a job, whose actions are methods of this class and their arguments."""

    def __init__(self, job: dict, rank: int):
        self.job, self.rank, self.folder = job, rank, Path(job["folder"])
        merged: list[int] = []
        watch_merging(merged)
        if "compiled_in" in job:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = job["compiled_in"]
        if "keeps_below" in job:
            keep_gathered(job["keeps_below"], LARGE if job.get("as_large") else {})
        place, model = local_place(job["port"]), self.folder / "model"
        trainer = Trainer(
            tiny_world.settings(job), rank, job["ranks"], place, model, NullRecorder()
        )
        self.trainer, shape, degrees = trainer, read_shape(model), job.get("degrees", [1, 2])

        def cuts(name: str, extent: tuple[int, ...]):
            return layout.cuts(name, extent, shape, degrees)

        trainer.open_store(self.folder / job["name"], cuts)
        beside = job.get("beside")
        self.beside = publish_beside(trainer, self.folder / "copied", cuts) if beside else None
        self.found = {"metrics": [], "errors": [], "second": [], "limits_s": limits_s()}
        self.found |= {"compares": trainer._updates is not None, "merged": sum(merged), "gone": []}
        self.found |= {"models": len(trainer.engine.models()), "compiled": [compilations()]}
        self.found["parameters"] = trainer.engine.parameters
        watch_second_copies(trainer, self.found["second"])
        gradients: list[dict] = []
        if job.get("gradients"):
            watch_gradients(trainer, gradients)
        parts = trainer.config.trainer.sequence_parallel
        self.replicas, self.replica = job["ranks"] // parts, rank // parts
        self.step = nullcontext
        for self.number, (action, *args) in enumerate(job["actions"]):
            getattr(self, action)(*args)
        if gradients:
            each = {f"{n} {name}": g for n, one in enumerate(gradients) for name, g in one.items()}
            np.savez(self.folder / f"{job['name']}-gradients-{rank}.npz", **each)
        self.found |= {"forms": forms(trainer), "operators": deepspeed.ops.__compatible_ops__}
        self.found["compiler"] = "torch._inductor.compile_fx" in sys.modules
        tiny_world.report(job, rank, self.found)
        trainer.close()

    def train(self, seed: int, limit: int, updates: int, reward_scale, *publish_as: int) -> None:
        rows, summary = make_batch(seed, self.job.get("lengths", tiny_world.LENGTHS))
        rows = tiny_world.with_experts(rows) if self.job.get("experts") else rows
        summary = replace(summary, rewards=[r * float(reward_scale) for r in summary.rewards])
        everyone, trees = plan(seed, rows, self.replicas, limit, updates)
        mine = everyone[self.replica]
        own = {row: rows[row] for update in mine for micro in update for row in micro}
        step = p.TrainStep(self.number, summary, mine, trees, 1)
        try:
            with self.step():
                self.found["metrics"].append(self.trainer.train(step, own, *publish_as))
        except TrainingDiverged as error:
            self.found["errors"].append(str(error))
        self.found["compiled"].append(compilations())

    def split(self, seed: int, limit: int) -> None:
        """A step whose trajectories have two branches each."""
        rows, summary = make_batch(seed)
        self._branched(seed, limit, map(tiny_world.in_halves, rows.values()), summary)

    def forked(self, seed: int, limit: int) -> None:
        """A step of `make_forked`, what its trajectories share trained once."""
        rows, summary = make_forked(seed)
        self._branched(seed, limit, rows.values(), summary)

    def _branched(self, seed: int, limit: int, trajectories, summary) -> None:
        split = segments.samples(list(trajectories), summary.segments)
        rows = {row: sample for row, (sample, _) in enumerate(split)}
        everyone, trees = plan(seed, rows, self.replicas, limit, 1)
        owners = [owner for _, owner in split]
        step = p.TrainStep(self.number, summary, everyone[self.replica], trees, 1, owners)
        self.found["metrics"].append(self.trainer.train(step, rows))

    def rounds(self, name, arguments, seed, kind, rounds, limit, kept: str) -> None:
        """A step in rounds, its gradient in the file `kept`; a checkpoint between rounds if it is
        called so."""
        self.trainer.algorithm = build(name, arguments)
        gradients: list = []
        watch_gradients(self.trainer, gradients)
        *first, last = tiny_world.stream_rounds(seed, kind, rounds, self.replicas, limit)
        for steps, rows in first:
            self.trainer.train_ahead(steps[self.replica], rows)
            if kept.startswith("saves"):
                self.save("between")
        self.found["metrics"].append(self.trainer.train(last[0][self.replica], last[1]))
        del self.trainer.engine._update
        gradients[0] |= {f"{n} after": w for n, w in weights(self.trainer).items()}
        np.savez(self.folder / f"{kept}-{self.rank}.npz", **gradients[0])

    def publish(self, version: int, away: str = "") -> None:
        """Old versions are tidied while the device is given back, if `away`."""
        self.trainer.publish(version)
        if away:
            self.trainer.share_device(self.folder)
            self.trainer.give_device_back()
        self.trainer.tidy()
        if away:
            self.trainer.take_device()
        if self.beside is not None:
            self.beside.publish(version)
            self.beside.tidy()

    def turn(self) -> None:
        """The device is given back and taken again."""
        self.trainer.share_device(self.folder)
        self.trainer.give_device_back()
        self.found["gone"].append(self.trainer._offload.nbytes)
        self.trainer.take_device()

    def watch(self, beat_s: float) -> None:
        """Train as in a run from now on."""
        self.step = watched(self.trainer, self.folder, self.rank, beat_s).step

    def stop(self, rank: int) -> None:
        """Stop that rank before its next backward pass, which the others go through."""
        backward = self.trainer.engine.backward

        def stopped(loss):
            os.kill(os.getpid(), signal.SIGSTOP)
            backward(loss)

        if self.rank == rank:
            self.trainer.engine.backward = stopped

    def save(self, name: str = "checkpoint") -> None:
        (self.folder / name).mkdir(exist_ok=True)
        self.trainer.save(self.folder / name)
        assert self.trainer.engine.writer.wait(120), "the checkpoint is still being written"
        self.trainer._peers.barrier()  # the others' files are needed to load it

    def load(self, name: str = "checkpoint") -> None:
        self.trainer.load(self.folder / name)

    def states(self, name: str) -> None:
        np.savez(self.folder / f"{name}-{self.rank}.npz", **states(self.trainer))

    def checkpointing(self) -> None:
        """Let layers keep only their inputs for the backward pass from now on."""
        hf = self.trainer.engine.policy.hf
        hf.gradient_checkpointing_enable({"use_reentrant": False})
        hf.disable_input_require_grads()  # made by that, too, behind rose/trainer/kernels.py's
