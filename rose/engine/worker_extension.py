"""Runs inside vLLM's worker: puts a version's tensors into the live parameters, and proves it.

Named in `worker_extension_cls`, so vLLM imports this module in every worker before it builds the model and
mixes `WorkerExtension` into its worker class; `Engine` calls the methods with `collective_rpc`.

At import, on a CPU: vLLM's prepacked matrix kernels (oneDNN, AMX) are switched off. They empty
`layer.weight`, so that an update in place would change nothing while looking like a success.
"""

from __future__ import annotations

import os
import time

import torch
from vllm.platforms import current_platform

from rose.config import read_shape
from rose.engine.layout import EMBEDDINGS, LocalSlice, slices
from rose.processes import die_with_parent
from rose.transfer import TransferError, Version, open_version
from rose.transfer.codec import digest

die_with_parent()
if current_platform.is_cpu():
    import vllm._custom_ops
    import vllm.model_executor.layers.utils as linear_kernels

    vllm._custom_ops._supports_onednn = False
    linear_kernels.check_cpu_sgl_kernel = lambda n, k, dtype: False
    if os.environ.get("ROSE_ENGINE_THREADS"):
        torch.set_num_threads(int(os.environ["ROSE_ENGINE_THREADS"]))


class WorkerExtension:
    """Mixed into vLLM's worker; `self.model_runner` and `self.vllm_config` are the worker's."""

    def rose_load_version(self, manifest: str) -> dict:
        """Load a committed version into the live parameters of this rank.

        Every tensor is read and hash-checked and every place is known to fit before the first parameter is
        touched. Then the live parameters are read back: each must hash to what the manifest says (of a part,
        or after a cast to the parameter's dtype: to what that part hashes to).
        Returns {version, nbytes, seconds, tensors, checksum_ok}. Raises `TransferError` naming the tensor.
        """
        start = time.perf_counter()
        with open_version(manifest) as version:
            parameters = dict(self.model_runner.get_model().named_parameters())
            plan = self._rose_plan(version, parameters)
            for _ in version.tensors():  # reading checks the hash
                pass
            expected = self._rose_copy(version, parameters, plan)
        for name, digest_wanted in expected.items():
            place = plan[name]
            found = digest(_bits(parameters[place.parameter][place.destination]))
            if found != digest_wanted:
                raise TransferError(f"{manifest}: tensor {name!r} in live parameter {place.parameter}: xxh3-128 "
                                    f"{found}, expected {digest_wanted}; the engine's weights are a mixture now")
        return {"version": version.version, "nbytes": version.nbytes, "seconds": time.perf_counter() - start,
                "tensors": len(expected), "checksum_ok": True}

    def rose_checksum(self) -> dict[str, str]:
        """xxh3-128 of every live parameter of this rank, padding included."""
        return {name: digest(_bits(p.data)) for name, p in self.model_runner.get_model().named_parameters()}

    def _rose_plan(self, version: Version, parameters: dict[str, torch.Tensor]) -> dict[str, LocalSlice]:
        """Place of every tensor; raises unless they fit and together fill every parameter."""
        shape = read_shape(self.vllm_config.model_config.model)
        tp_size = self.vllm_config.parallel_config.tensor_parallel_size
        plan, filled = {}, dict.fromkeys(parameters, 0)
        for name, entry in version.entries.items():
            try:
                place = slices(name, tuple(entry.shape), shape, self.rank % tp_size, tp_size)
            except ValueError as error:
                raise TransferError(f"{version.path}: {error}") from error
            if place is None:
                continue
            size = torch.Size(s.stop - s.start for s in place.source)
            if place.parameter not in parameters or parameters[place.parameter][place.destination].shape != size:
                raise TransferError(f"{version.path}: tensor {name!r} {tuple(size)} doesn't fit the engine's parameter "
                                    f"{place.parameter} {tuple(parameters.get(place.parameter, torch.empty(0)).shape)}")
            plan[name] = place
            filled[place.parameter] += size.numel()
        for parameter, count in filled.items():
            short = count < parameters[parameter].numel() and not (parameter in EMBEDDINGS and parameter in plan)
            if short:
                raise TransferError(f"{version.path}: version {version.version} fills {count} of "
                                    f"{parameters[parameter].numel()} elements of the engine's parameter {parameter}")
        return plan

    @torch.no_grad()
    def _rose_copy(self, version: Version, parameters: dict[str, torch.Tensor],
                   plan: dict[str, LocalSlice]) -> dict[str, str]:
        """Copy in place; returns the hash that each tensor's place must have now."""
        expected = {}
        for name, place in plan.items():
            entry, array = version.entries[name], version.read(name)
            tensor = torch.from_numpy(array)
            if entry.dtype == "bfloat16":
                tensor = tensor.view(torch.bfloat16)
            live = parameters[place.parameter][place.destination]
            part = tensor[place.source].to(live.dtype)
            live.copy_(part)
            whole = part.shape == tensor.shape and part.dtype == tensor.dtype
            expected[name] = entry.xxh3 if whole else digest(_bits(part))
        return expected


def _bits(tensor: torch.Tensor):
    """Contiguous bytes of a tensor as an ndarray."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
