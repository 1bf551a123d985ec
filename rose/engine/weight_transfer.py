"""ROSE's weight-transfer engine for vLLM, one in each worker. It stages versions (decodes changes)
in a thread, then flips them (writes the changes into the live weights).

vLLM calls `start_weight_update`, `update_weights` and `finish_weight_update`. `update_weights` only
begins the staging, so that the worker keeps generating. `finish_weight_update`, while generation is
paused, only flips the staged version; then a thread verifies the live weights. Meanwhile `Engine`
polls the `status`. Importing this module imports vLLM.
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
    """Empty, because every update names its store."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The version to be loaded, and where and how."""

    version: int
    store: str  # folder, or a relay's URL
    mirror: str | None  # folder with the payloads broadcast to this node
    token_file: str | None  # file with the relay's token
    threads: int
    dense_bytes: int  # see rose.transfer.stage
    device_bytes: int  # see rose.transfer.changes; ignored on a CPU
    verify_every: int  # see Receiver.stage
    timeout_s: float


class RoseWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Stages, flips and checks policy versions in one worker's live weights."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        for name, parameter in model.named_parameters():  # vLLM has just loaded the model
            check_type(name, parameter)
        # On a GPU that engines share, either engine may take free memory at any moment. So staging
        # takes little, from the cache of torch's allocator. `Changes.release` would empty that
        # cache after a large staging, but engine steps need it.
        self._shares_gpu = device.type == "cuda" and plugin.FOLDER in os.environ
        self._live: Live | None = None
        # Lineage and version of the live weights. The version is None if they are a mixture.
        self._held: tuple[str | None, int | None] = (None, INITIAL)
        self._staged: Staged | None = None
        self._staging: UpdateInfo | None = None
        self._wanted = False  # false once the version being staged was abandoned
        self._handover = threading.Lock()  # guards `_wanted` and `_staged`
        self._receiver: Receiver | None = None
        # Fingerprint of the adapter's base that the live weights equal; "" if none was compared.
        self._base_fingerprint = ""
        parallel = vllm_config.parallel_config
        self._rank = parallel.rank % parallel.tensor_parallel_size
        self._status: dict[str, Any] = {"state": "idle"}
        # This takes long only on a machine without numba's cache of these functions.
        threading.Thread(target=codec.compile_all, name="rose-compile", daemon=True).start()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        """Drop a staged version. Raises `TransferError` while one is being staged or checked."""
        if self._status["state"] in ("staging", "checking"):
            raise TransferError(f"version {self._staging.version} is being staged or checked")
        self.abandon()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to stage a version and return at once; the base class would wait for the device."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._staging, self._status, self._wanted = update_info, {"state": "staging"}, True
        threading.Thread(target=self._stage, name="rose-stage", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """Return `state` and the figures of the last version. `state` is idle, staging, staged,
        checking, loaded or failed. When it is failed, `error` is the text, and `mixture` is true if
        the live weights belong to no version."""
        return self._status

    def abandon(self) -> None:
        """Drop the version that is staged, and stop a version that is being staged. The staging
        thread first finishes the blocks that it is busy with."""
        with self._handover:
            self._wanted = False
            staged, self._staged = self._staged, None
        if staged is not None:
            staged.release()

    @property
    def holds_initial(self) -> bool:
        """True if the live weights are those of the model's folder."""
        return self._held[1] == INITIAL

    def reset(self) -> None:
        """Forget all versions. The live weights are gone, and the model's folder will be read."""
        self.abandon()
        if self._receiver is not None:
            self._receiver.close()
        self._live = self._receiver = None
        self._held = (None, INITIAL)
        self._status = {"state": "idle"}
        self._base_fingerprint = ""

    def finish_weight_update(self) -> None:
        """Flip the staged version, if any, then verify it in a thread while generation continues.
        An error goes into `status`: if this method raised it, vLLM's session would stay open."""
        if self._staged is None:
            return
        try:
            self._staged.flip()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            self._set_failed(error, mixture="was undone" not in str(error))
            return
        self._held = (self._receiver.lineage, self._staging.version)
        self._status = self._status | {"state": "checking"}
        threading.Thread(
            target=self._check, args=(self._staged,), name="rose-check", daemon=True
        ).start()
        self._staged = None

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    # ----------------------------------------------------------------- in a thread of its own

    def _stage(self) -> None:
        """Stage the version. On an error, set `status`; the old version keeps serving."""
        info, began = self._staging, time.perf_counter()
        try:
            if self._live is None:
                self._live = Live(adapter.slots(self.model) or adapter.base(self.model))
            if self._receiver is None or self._receiver.where != (info.store, info.mirror):
                if self._receiver is not None:
                    self._receiver.close()
                    self._receiver = None  # no closed receiver if the next line raises
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
            with self._handover:
                if self._wanted:
                    self._staged, self._status = staged, status
                    return
            staged.release()
            raise TransferError(f"version {info.version} was abandoned while it was staged")
        except Exception as error:
            self._set_failed(error, mixture=False)

    def _device_bytes(self, info: UpdateInfo) -> int | None:
        """Return the device's bytes that staging may take; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return min(MIN_BYTES, info.device_bytes) if self._shares_gpu else info.device_bytes

    def _check(self, staged: Staged) -> None:
        """Verify the flipped version, and set the status."""
        wrong, began = None, time.perf_counter()
        try:
            staged.check()
        except Exception as error:
            wrong = error
        # Release before the new status is set, as the next version may arrive right after that.
        staged.release()
        if wrong is None:
            took = time.perf_counter() - began
            self._status = self._status | {"state": "loaded", "check_s": took}
        else:
            self._set_failed(wrong, mixture=True)

    def _set_failed(self, error: Exception, mixture: bool) -> None:
        if mixture:
            self._held = (None, None)
        self.abandon()
        text = f"{type(error).__name__}: {error}"
        self._status = {"state": "failed", "error": text, "mixture": mixture}

    def _places(self, plan: Plan, live: Live) -> dict[int, Place]:
        """Map each block of the store to its place in the live weights. Raises `TransferError`
        unless the blocks of a whole model fill the engine's parameters exactly. For an adapter,
        raises it if the live weights are not the adapter's base."""
        shape = read_shape(self.model_config.model)
        tp_size = self.parallel_config.tensor_parallel_size
        by_expert = self.parallel_config.enable_expert_parallel

        def local(name: str, extent: tuple[int, ...]) -> LocalSlice | None:
            return slices(name, extent, shape, self._rank, tp_size, by_expert)

        if (plan.base is not None) != bool(adapter.slots(self.model)):
            kind, how = ("an adapter", "without") if plan.base else ("whole models", "with")
            raise TransferError(
                f"the store's versions are {kind}, and this engine was started {how} trainer.lora"
            )
        places, filled = place_blocks(plan, local, live)
        if plan.base is not None:
            if plan.base.fingerprint != self._base_fingerprint:
                self._compare_base(plan.base, local)
            return places
        for parameter, count in filled.items():
            wanted = live.matrices[parameter].numel()
            # No tensor of the store fills the padding of the vocabulary.
            if count < wanted and not (parameter in EMBEDDINGS and count):
                raise TransferError(
                    f"the store's tensors fill {count} of {wanted} values of the engine's "
                    f"parameter {parameter}"
                )
        return places

    def _compare_base(self, base: Base, local: Callable[..., LocalSlice | None]) -> None:
        """Compare the live weights with an adapter's base (`rose.transfer.digests.compare`). One
        comparison is enough, because the base doesn't change until `reset`."""
        info, live = self._staging, Live(adapter.base(self.model))
        places, _ = place_blocks(base, local, live)
        folder, end = self.model_config.model, time.monotonic() + info.timeout_s
        compare(base, places, live, info.threads, folder, lambda: self._wanted, end)
        self._base_fingerprint = base.fingerprint
