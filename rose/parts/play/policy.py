"""The policy that plays: a rollout engine with the chosen version of the weights.

The engine starts with the weights that the run began with, which are version 0, and loads a later
version from the run's store as a rollout engine does. A version that only a checkpoint has is first
exported into the scratch folder. Nothing is written into the run's folder.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rose import protocol as p
from rose.config import Config, ConfigError, Draft, Lora, Rollout, read_shape
from rose.parts.play.source import Source
from rose.processes import cores
from rose.trainer import checkpoint
from rose.transfer.errors import TransferError

FIRST = 0  # the version of the weights that a run begins with
# Tries to load the newest version, which the trainer may remove while it is read. A newer version
# is available then. So a second try succeeds unless the trainer publishes faster than engines read.
TRIES = 3
SEQUENCES = 8  # calls of a program that may run at once
# vLLM refuses to start on a GPU of which less than this share is free. If the KV cache has a fixed
# size, the share has no other use. So a small share lets a run and a game share a GPU.
FREE_SHARE = 0.02
FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
GIB = 2**30


class Policy:
    """The policy in `source`. `seed` is the engine's. `scratch` is a folder for files that vLLM and
    an export write; the caller removes it."""

    def __init__(self, source: Source, seed: int, scratch: Path) -> None:
        self._source, self._seed, self._scratch = source, seed, scratch
        self._engine = None
        self._pinned = False  # True if the user chose `version`
        self.version = FIRST

    def choose(self, version: int | None) -> None:
        """Select the version that `load` loads; None selects the newest.

        Raises `ConfigError` if the run doesn't have this version, or has none yet.
        """
        if not self._source.is_run:
            return
        self._pinned = version is not None
        saved = {FIRST} | self._source.saved().keys()
        if version is not None and version not in saved:
            there = ", ".join(map(str, sorted(saved)))
            raise ConfigError(
                f"--version {version}: {self._source.place} doesn't have it; there are {there}"
            )
        self.version = self.newest() if version is None else version

    async def load(self) -> None:
        """Start the engine, or load the chosen version into it.

        If the trainer removes the version meanwhile, the newest is loaded instead, but not if the
        user chose the version. Versions must be loaded in rising order. Raises `ConfigError`,
        `EngineError`, and `TransferError` for a damaged version.
        """
        if not self._source.is_run:
            await self._start(self._source.model, None)
            return
        for tries_left in reversed(range(TRIES)):
            try:
                await self._load(self.version)
                return
            except TransferError:
                newest = self.newest()
                if self._pinned or not tries_left or newest == self.version:
                    raise
                self.version = newest

    def newest(self) -> int:
        """Return the run's newest version. Raises `ConfigError` while it has none."""
        saved = self._source.saved()
        if not saved:
            raise ConfigError(
                f"{self._source.place}: no version of the weights yet; a run has one once it has "
                f"begun to train. --version {FIRST} plays the model that it began with"
            )
        return max(saved)

    @property
    def label(self) -> str:
        """Description of the version: "before training", "after 6 training steps"."""
        if not self._source.is_run:
            return "as exported"
        if self.version == FIRST:
            return "before training"
        return f"after {self.version} training step{'s' * (self.version > 1)}"

    async def turn(self, request: p.TurnRequest, on_tokens: Callable[[list[int]], None]):
        """Generate one turn. `on_tokens` gets all tokens of the turn whenever new ones arrive."""
        tokens: list[int] = []
        logprobs: list[float] = []
        async for chunk in self._engine.generate(request.turn, request.tokens, request.sampling):
            tokens += chunk.tokens
            logprobs += chunk.logprobs
            on_tokens(tokens)
        made_by = p.pack_tokens([self.version] * len(tokens))
        packed = (p.pack_tokens(tokens), p.pack_floats(logprobs), made_by)
        return p.TurnResult(request.turn, *packed, chunk.finish)

    async def close(self) -> None:
        """End the engine's process; safe when called twice."""
        if self._engine is not None:
            await self._engine.shutdown()

    async def _load(self, version: int) -> None:
        """Start the engine with `version`, from the run's store or else from a checkpoint."""
        config = self._source.config
        if version == FIRST:
            await self._start(self._source.model, config.trainer.lora)
            return
        saved = self._source.saved()
        if version not in saved:
            raise TransferError(
                f"version {version} of {self._source.place} was removed by the trainer; there are "
                f"{', '.join(map(str, sorted(saved)))}"
            )
        if (saved[version] / checkpoint.TRAINER_STATE).is_file():
            folder = await self._exported(version)
            await self.close()
            self._engine = None
            await self._start(folder, None)
            return
        await self._start(self._source.model, config.trainer.lora)
        await self._engine.load_version(version, str(saved[version]), config.transfer)

    async def _start(self, folder: Path, lora: Lora | None) -> None:
        """Start the engine with the weights in `folder`, unless it runs already."""
        if self._engine is not None:
            return
        from rose.engine.vllm_engine import Engine

        config = self._source.config
        gpus = config.cluster.gpus > 0
        rollout = rollout_of_one(config, folder)
        with _temporary_files_in(self._scratch):
            self._engine = await Engine.start(
                folder, rollout, config.model, gpus=gpus, seed=self._seed, lora=lora
            )

    async def _exported(self, version: int) -> Path:
        """Export the checkpoint of `version` and return the model's folder. Raises
        `TransferError`."""
        out = self._scratch / f"version-{version}"
        command = [sys.executable, "-m", "rose.export", str(self._source.place)]
        command += ["--step", str(version), "--out", str(out)]
        command += ["--merge"] * (self._source.config.trainer.lora is not None)
        # The export gets a process of its own, because an engine can't be forked from a process
        # that has used torch's threads.
        export = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, said = await export.communicate()
        finally:
            if export.returncode is None:
                export.kill()
                await export.wait()
        if export.returncode:
            raise TransferError(said.decode(errors="replace").strip())
        return out


def rollout_of_one(config: Config, folder: Path) -> Rollout:
    """Return the run's engine settings with memory for one game, and no more threads than cores.

    Tokens are reported one by one. There are no drafts, which would need other requests to learn
    from.
    """
    rollout = config.rollout
    shape = read_shape(folder)
    per_token = shape.kv_bytes_per_token * FLOAT_BYTES[config.model.dtype] / 2
    needed = per_token * config.model.max_context * 2 / rollout.tensor_parallel / GIB
    threads = rollout.threads and min(rollout.threads, cores())
    share = FREE_SHARE if config.cluster.gpus else rollout.gpu_memory_utilization
    return msgspec.structs.replace(
        rollout,
        workers=1,
        max_sequences=SEQUENCES,
        kv_cache_gib=max(needed, 0.05),
        gpu_memory_utilization=share,
        stream_interval=1,
        draft=Draft("none", 1, False, 1),
        threads=threads,
    )


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Make vLLM create its files in `folder`, because it leaves some behind."""
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
