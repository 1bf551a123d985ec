"""The backend `apptainer`, for clusters that offer only that (Singularity has the same options).

An instance holds the namespaces; the session and its checks run in it. What they write lies in an
overlay folder of the sandbox and survives a restart of the session. Limits are set only with root,
because Apptainer needs control groups for them, which a site would have to delegate.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import ClassVar

from rose.parts.sandbox.backend import SESSION, Spec
from rose.parts.sandbox.piped import Piped

NAME, PROGRAM = "apptainer", "apptainer"


class Apptainer:
    NAME, PROGRAM, keeps_files = NAME, PROGRAM, True
    captures: ClassVar[dict[str, str]] = {}

    @staticmethod
    def prepare(spec: Spec, folder: Path) -> None:
        (folder / "overlay").mkdir()
        (folder / "base").mkdir()

    @staticmethod
    def begin(spec: Spec, folder: Path) -> list[list[str]]:
        limits = spec.limits
        options = [
            "--containall",
            "--no-home",
            "--cleanenv",
            "--net",
            "--network=none",
            "--fakeroot",
        ]
        options += ["--no-privs", "--hostname=sandbox", "--overlay", f"{folder}/overlay"]
        if os.geteuid() == 0:
            options += [f"--memory={limits.memory_mib}M", f"--pids-limit={limits.processes}"]
            options += [f"--cpus={limits.cpus:g}"]
        for each in spec.mounts:
            options += ["--bind", f"{each.source}:{each.target}:ro"]
        for key, value in spec.variables().items():
            options += ["--env", f"{key}={value}"]
        image = spec.image or f"{folder}/base"
        if spec.image is None:
            for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64"):
                if os.path.isdir(path):
                    options += ["--bind", f"{path}:{path}:ro"]
        made = Apptainer.beside(spec, folder, ["/bin/mkdir", "-p", spec.workdir])
        return [[PROGRAM, "instance", "start", *options, image, folder.name], made]

    @staticmethod
    def session(spec: Spec, folder: Path) -> list[str]:
        script = f"cd {shlex.quote(spec.workdir)}\n{SESSION}"
        argv = ["/bin/bash", "--norc", "--noprofile", "-c", script]
        return Apptainer.beside(spec, folder, argv)

    @staticmethod
    def beside(spec: Spec, folder: Path, argv: list[str]) -> list[str]:
        return [PROGRAM, "exec", f"instance://{folder.name}", *argv]

    @staticmethod
    def end(folder: Path) -> list[list[str]]:
        return [[PROGRAM, "instance", "stop", folder.name]]


async def begin(spec: Spec) -> Piped:
    """Start a sandbox. Raises `SandboxError`."""
    return await Piped(Apptainer, spec).begin()
