"""vLLM's weight-transfer engine "rose", in each worker: stages versions in a thread, then flips.

vLLM drives it (`start_weight_update`, `update_weights`, `finish_weight_update`); `update_weights`
only begins the staging, so that the worker goes on generating, and `finish_weight_update`, with
generation paused, only flips. In between and afterwards `Engine` asks for the `status`. Importing
this module imports vLLM.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rose.config import read_shape
from rose.engine import adapter, plugin
from rose.engine.layout import EMBEDDINGS, LocalSlice, slices
from rose.transfer import codec
from rose.transfer.base import Base
from rose.transfer.changes import MIN_BYTES
from rose.transfer.digests import compare
from rose.transfer.errors import TransferError
from rose.transfer.live import Live, Place, check_type
from rose.transfer.receive import Receiver
from rose.transfer.stage import Staged, place_blocks
from rose.transfer.store import INITIAL, Plan

NAME = "rose"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to set up: every update names its store."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    version: int
    store: str  # folder, or a relay's URL
    mirror: str | None  # folder of what was broadcast to this node
    token_file: str | None  # of the relay
    threads: int
    dense_bytes: int  # see rose.transfer.stage
    device_bytes: int  # see rose.transfer.changes; on a CPU all memory is the host's
    verify_every: int  # see Receiver.stage
    timeout_s: float


class RoseWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        for name, parameter in model.named_parameters():  # vLLM has just loaded the model
            check_type(name, parameter)
        # What is free of a device that engines share is KV memory that was given back: who needs it
        # takes it at once. The allocator keeps the little that staging takes: emptied, it would
        # lose what steps need (rose/engine/headroom.py).
        self._shares = device.type == "cuda" and plugin.FOLDER in os.environ
        self._live: Live | None = None
        # lineage, version; (_, null): a mixture
        self._held: tuple[str | None, int | None] = (None, INITIAL)
        self._staged: Staged | None = None
        self._staging: UpdateInfo | None = None
        self._wanted = False  # whether what is being staged will be flipped
        self._handover = threading.Lock()  # of what was staged, to who flips it
        self._receiver: Receiver | None = None
        self._below = ""  # fingerprint of an adapter's base that the live weights were found to be
        parallel = vllm_config.parallel_config
        self._rank = parallel.rank % parallel.tensor_parallel_size
        self._status: dict[str, Any] = {"state": "idle"}
        # Takes time only where it never ran before.
        threading.Thread(target=codec.compile_all, name="rose-compile", daemon=True).start()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if self._status["state"] in ("staging", "checking"):
            raise TransferError(f"version {self._staging.version} is being staged or checked")
        self.abandon()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to stage; returns at once (vLLM's own waits for the device)."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._staging, self._status, self._wanted = update_info, {"state": "staging"}, True
        threading.Thread(target=self._stage, name="rose-stage", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """`state`: idle, staging, staged, failed (with `error`, and whether the weights are a
        `mixture`), checking, or loaded; and figures of the last version."""
        return self._status

    def abandon(self) -> None:
        """Whatever is staged, or being staged, won't be flipped: the first is released now, the
        second ends with the blocks that it is at."""
        with self._handover:
            self._wanted = False
            staged, self._staged = self._staged, None
        if staged is not None:
            staged.release()

    @property
    def holds_initial(self) -> bool:
        """Whether the live weights are those of the model's folder."""
        return self._held[1] == INITIAL

    def begin_anew(self) -> None:
        """The live weights are gone; the next are the folder's own."""
        if self._receiver is not None:
            self._receiver.close()
        self._live = self._receiver = self._staged = None
        self._held, self._status, self._below = (None, INITIAL), {"state": "idle"}, ""

    def finish_weight_update(self) -> None:
        """Flip what is staged, if anything; then it is read back and compared, while generation
        goes on. An error is in `status`: raised, it would leave vLLM's session open for good."""
        if self._staged is None:
            return
        began = time.perf_counter()
        try:
            self._staged.flip()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            self._failed(error, mixture="was undone" not in str(error))
            return
        self._held = (self._receiver.lineage, self._staging.version)
        self._status = self._status | {"state": "checking", "flip_s": time.perf_counter() - began}
        threading.Thread(
            target=self._check, args=(self._staged,), name="rose-check", daemon=True
        ).start()
        self._staged = None

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    # ----------------------------------------------------------------- in a thread of its own

    def _stage(self) -> None:
        info, began = self._staging, time.perf_counter()
        try:
            if self._live is None:
                self._live = Live(adapter.slots(self.model) or adapter.base(self.model))
            if self._receiver is None or self._receiver.where != (info.store, info.mirror):
                if self._receiver is not None:
                    self._receiver.close()
                    self._receiver = None  # the next one can be refused
                self._receiver = Receiver(
                    info.store, info.mirror, info.token_file, self._places, self._live
                )
            lineage, version = self._held
            have = version if version == INITIAL or lineage == self._receiver.lineage else None
            staged = self._receiver.stage(
                have,
                info.version,
                info.threads,
                info.dense_bytes,
                info.timeout_s,
                self._device_bytes(info),
                info.verify_every,
                lambda: self._wanted,
            )
            status = {
                "state": "staged",
                "nbytes": staged.nbytes,
                "changed": staged.changed,
                "route": staged.route,
                "mirrored": staged.mirrored,
                "stage_s": time.perf_counter() - began,
            }
            if not self._hand_over(staged, status):
                staged.release()
                raise TransferError(f"version {info.version} was abandoned while it was staged")
        except Exception as error:  # the old version goes on serving, and the caller gets the error
            self._failed(error, mixture=False)

    def _device_bytes(self, info: UpdateInfo) -> int | None:
        if self.device.type != "cuda":
            return None
        return min(MIN_BYTES, info.device_bytes) if self._shares else info.device_bytes

    def _hand_over(self, staged: Staged, status: dict[str, Any]) -> bool:
        """Whether somebody still wants it."""
        with self._handover:
            if self._wanted:
                self._staged, self._status = staged, status
            return self._wanted

    def _check(self, staged: Staged) -> None:
        wrong, began = None, time.perf_counter()
        try:
            staged.check()
        except Exception as error:
            wrong = error
        staged.release()  # before this one is reported done: the next may arrive at once
        if wrong is None:
            took = time.perf_counter() - began
            self._status = self._status | {"state": "loaded", "check_s": took}
        else:
            self._failed(wrong, mixture=True)

    def _failed(self, error: Exception, mixture: bool) -> None:
        if mixture:
            self._held = (None, None)
        self.abandon()
        text = f"{type(error).__name__}: {error}"
        self._status = {"state": "failed", "error": text, "mixture": mixture}

    def _places(self, plan: Plan, live: Live) -> dict[int, Place]:
        """Raises `TransferError` unless the blocks fill the engine's parameters exactly; or, where
        they are an adapter's, unless the engine has the weights below it."""
        shape = read_shape(self.model_config.model)
        tp_size = self.parallel_config.tensor_parallel_size
        by_expert = self.parallel_config.enable_expert_parallel

        def local(name: str, extent: tuple[int, ...]) -> LocalSlice | None:
            return slices(name, extent, shape, self._rank, tp_size, by_expert)

        if (plan.base is not None) != bool(adapter.slots(self.model)):
            has, is_ = ("an adapter", "without") if plan.base else ("whole models", "with")
            raise TransferError(
                f"the store's versions are {has}, and this engine was started {is_} trainer.lora"
            )
        places, filled = place_blocks(plan, local, live)
        if plan.base is not None:
            if plan.base.fingerprint != self._below:
                self._compare(plan.base, local)
            return places
        for parameter, count in filled.items():
            wanted = live.matrices[parameter].numel()
            # their padding is nobody's
            if count < wanted and not (parameter in EMBEDDINGS and count):
                raise TransferError(
                    f"the store's tensors fill {count} of {wanted} values of the engine's "
                    f"parameter {parameter}"
                )
        return places

    def _compare(self, base: Base, local: Callable[..., LocalSlice | None]) -> None:
        """See `rose.transfer.digests.compare`; once is enough while the live weights stay."""
        info, live = self._staging, Live(adapter.base(self.model))
        places, _ = place_blocks(base, local, live)
        folder, end = self.model_config.model, time.monotonic() + info.timeout_s
        compare(base, places, live, info.threads, folder, lambda: self._wanted, end)
        self._below = base.fingerprint
