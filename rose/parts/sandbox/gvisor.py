"""The backend `gvisor`: runsc, a kernel in user space, for stronger isolation.

It runs as root, or without root in a user namespace. The session is the container's first process,
on three pipes: runsc could not restore a session that `runsc exec` had started (measured). When a
session has to be restarted, the files that it wrote are lost.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

from rose.parts.sandbox.backend import MIB, SESSION, Spec
from rose.parts.sandbox.piped import Piped

NAME, PROGRAM = "gvisor", "runsc"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ssl")
KEPT = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE")


class Runsc:
    """The commands of runsc for a sandbox (`piped.Program`)."""

    NAME, PROGRAM, keeps_files = NAME, PROGRAM, False
    captures: ClassVar[dict[str, str]] = {
        "files": "its files are in its own kernel, whose images include the processes",
        "process": "",
    }

    @staticmethod
    def prepare(spec: Spec, folder: Path) -> None:
        """Write the container's bundle, which runsc reads."""
        for name in ("state", "bundle", "bundle/root"):
            (folder / name).mkdir()
        (folder / "bundle" / "config.json").write_text(
            json.dumps(config(spec, folder)), encoding="utf-8"
        )

    @staticmethod
    def setup_commands(spec: Spec, folder: Path) -> list[list[str]]:
        return []

    @staticmethod
    def session_command(spec: Spec, folder: Path) -> list[str]:
        return [*_runsc_command(folder), "run", "-bundle", f"{folder}/bundle", folder.name]

    @staticmethod
    def exec_command(spec: Spec, folder: Path, argv: list[str]) -> list[str]:
        return [*_runsc_command(folder), "exec", folder.name, *argv]

    @staticmethod
    def end_commands(folder: Path) -> list[list[str]]:
        return [[*_runsc_command(folder), "delete", "-force", folder.name]]

    @staticmethod
    def capture_command(folder: Path, images: Path) -> list[str]:
        own = ["checkpoint", "-leave-running", "-image-path", str(images)]
        return [*_runsc_command(folder), *own, folder.name]

    @staticmethod
    def restore_command(folder: Path, images: Path) -> list[str]:
        own = ["restore", "-image-path", str(images), "-bundle", f"{folder}/bundle"]
        return [*_runsc_command(folder), *own, folder.name]


def _runsc_command(folder: Path) -> list[str]:
    own = [] if os.geteuid() == 0 else ["unshare", "-U", "-r", "-m"]
    options = ["-network=none", "-ignore-cgroups", "-overlay2=root:memory", "-platform=systrap"]
    return [*own, PROGRAM, "-root", f"{folder}/state", *options]


def config(spec: Spec, folder: Path) -> dict[str, Any]:
    """Return the content of config.json, which describes the container (OCI runtime-spec 1.0.2)."""
    capabilities = [f"CAP_{name}" for name in KEPT]
    mounts = [(each.source, each.target) for each in spec.mounts]
    if spec.image is None:
        # Some of these are links on merged-usr systems. Agents could replace links, but not mounts.
        mounts += [(os.path.realpath(p), p) for p in SYSTEM if os.path.isdir(p)]
    tmpfs = {"type": "tmpfs", "source": "tmpfs"}
    limits = spec.limits
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/bash", "--norc", "--noprofile", "-c", SESSION],
            "env": [f"{key}={value}" for key, value in spec.variables().items()],
            "cwd": spec.workdir,
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "rlimits": [
                {"type": "RLIMIT_NPROC", "soft": limits.processes, "hard": limits.processes}
            ],
        },
        "root": {"path": spec.image or f"{folder}/bundle/root", "readonly": False},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", **tmpfs},
            *({"destination": at, **tmpfs} for at in ("/tmp", "/root", spec.workdir)),
            *(
                {"destination": at, "type": "bind", "source": source, "options": ["rbind", "ro"]}
                for source, at in mounts
            ),
        ],
        "linux": {
            "namespaces": [{"type": n} for n in ("pid", "network", "ipc", "uts", "mount")],
            "resources": {
                "memory": {"limit": limits.memory_mib * MIB},
                "pids": {"limit": limits.processes},
                "cpu": {"quota": int(limits.cpus * 100_000), "period": 100_000},
            },
        },
    }


async def begin(spec: Spec, images: Path | None = None) -> Piped:
    """Start a sandbox, from the `images` of a capture if given. Raises `SandboxError`."""
    return await Piped(Runsc, spec).begin(images)
