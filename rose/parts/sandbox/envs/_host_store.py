"""The store of the sandboxes of an environment host (`rose.agent.playing.Store`)."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rose.config import Config, ConfigError
from rose.observe.recorder import NullRecorder
from rose.parts.sandbox import SandboxError
from rose.parts.sandbox.engine import Engine


class HostStore(Engine):
    """A host's store, with its policy for checkpoints (sandbox.checkpoints)."""

    policy: str


async def open_store(config: Config, snapshots: Path, recorder: NullRecorder) -> HostStore | None:
    """Open the store of this host's sandboxes. It keeps a sandbox's states while its trajectory has
    a folder in `snapshots`. Return None if sandbox.checkpoints=none. Raises `ConfigError`."""
    c = config.sandbox
    if c.checkpoints == "none":
        return None
    # Runs that share a store use the same trajectory ids, so each run has a folder of its own.
    path = str(config.run_dir.resolve()).encode()
    run = f"{config.name}-{hashlib.blake2s(path, digest_size=8).hexdigest()}"
    store = HostStore(
        Path(c.store) / run if c.store else config.run_dir / "sandboxes",
        Path(c.local) if c.local else None,
        c.bytes_per_s,
        c.memory_mib,
        c.keep,
        lambda name: (snapshots / name).exists(),
        recorder.counter,
    )
    store.policy = c.checkpoints
    try:
        await store.open()
    except SandboxError as error:
        raise ConfigError(
            f"sandbox.store={c.store!r}, sandbox.local={c.local!r}: {error}"
        ) from None
    return store
