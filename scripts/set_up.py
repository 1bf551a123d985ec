"""Set up an environment from the locks of requirements/, with one line of progress for each phase.

    scripts/set_up.sh .venv cpu         what `make train` runs in
    scripts/set_up.sh .venv-gpu gpu     what `make gpu` makes
    scripts/set_up.sh .venv test        adds to `cpu` what only the tests need

`scripts/set_up.sh` finds the Python that runs this file, which uses the standard library alone.
Calling it again continues a set-up that was interrupted. What pip prints goes to DIR/set-up.log.

torch for CPUs is taken from the first of these that offers it:

1. pip's own settings (an index or folder of wheels that the site or the user has configured);
2. PyTorch's index of CPU builds, `TORCH_INDEX`;
3. the package index, whose build of the same version is for CUDA. It computes on CPUs just as well,
   but it can't be imported without CUDA's libraries, which requirements/torch-cuda.txt names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"
# Packages that come as source are built with these.
BUILD_TOOLS = ("setuptools==78.1.1", "wheel==0.48.0")
# Seconds that asking TORCH_INDEX for torch's versions may take.
PROBE_S = 15
IMPATIENT = ("--timeout", "4", "--retries", "0")  # seconds that one of its connections may take
QUOTED_LINES = 15  # last lines of pip's output, shown when it fails
NUMA = "libnuma.so.1"
MARK = "rose-set-up"  # a file in environments that this file has made
# Variables by which packages outside of an environment would be taken for its own, or installed
# elsewhere: modules of a cluster set the first of them.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
# Loads a library of the environment in each of its Pythons, so that vLLM's kernels find it loaded.
PRELOAD = 'import ctypes, sys; ctypes.CDLL(f"{{sys.prefix}}/{path}")\n'
# The kernels that vLLM picks for this processor (vllm/platforms/cpu.py), loaded as it loads them.
# vLLM itself only warns where they can't be loaded, and its engine ends later with another error.
CHECK_CPU = """
import ctypes, importlib.util
import torch
here = importlib.util.find_spec("vllm").submodule_search_locations[0]
avx512, amx = torch.cpu._is_avx512_supported(), torch.cpu._is_avx512_bf16_supported()
name = ("_C" if amx else "_C_AVX512") if avx512 else "_C_AVX2"
ctypes.CDLL(f"{here}/{name}.abi3.so")
import mpi4py
mpi4py.rc.initialize = False
import mpi4py.MPI
"""
# CUDA's kernels of vLLM need the driver, which a login node may lack: the doctor tries them.
CHECK_GPU = "import torch, mpi4py; assert torch.version.cuda, 'this torch has no CUDA'"


class Failed(Exception):
    """The set-up can't go on; the message says what to do."""


class Environment:
    """A virtual environment in `folder`, and what is done to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "set-up.log"
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:4.0f} s] {text}", flush=True)

    def make(self) -> None:
        """Make it, or keep the one whose Python runs this: scripts/set_up.sh has checked it."""
        version = "{}.{}.{}".format(*sys.version_info)
        if self.folder.is_dir() and any(self.folder.iterdir()) and not self._is_own():
            raise Failed(
                f"VENV={self.folder}: has files or packages of something else; name another folder"
            )
        if Path(sys.prefix).resolve() == self.folder.resolve():
            self.say(f"{self.folder}: kept, Python {version} (`make clean` removes it)")
        else:
            self.say(f"{self.folder}: a virtual environment of Python {version} ({sys.executable})")
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / MARK).touch()  # First, so that an interrupted call can be continued.
            for old in self.folder.iterdir():
                if old.is_dir() and not old.is_symlink():
                    shutil.rmtree(old)
                elif old.name != MARK:
                    old.unlink()
            venv.create(self.folder, symlinks=True, with_pip=True)
        self.install(*BUILD_TOOLS)

    def install(self, *arguments: str, hint: str = "") -> None:
        """pip install, without dependencies and uncompiled. Raises `Failed` with pip's last lines
        and `hint`."""
        command = self._pip("install", "--no-deps", "--no-compile", *arguments)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        if code:
            end = self.log.read_text(errors="replace", encoding="utf-8").splitlines()[
                -QUOTED_LINES:
            ]
            quoted = "\n".join(f"    {line}" for line in end)
            raise Failed(
                f"pip failed{hint}; its output ends so ({self.log} has all of it):\n{quoted}"
            )

    def install_lock(self, name: str, what: str) -> None:
        self.say(f"the packages of requirements/{name}, {what}")
        self.install("-r", str(LOCKS / name))

    def install_rose(self) -> None:
        self.say("ROSE itself, from this checkout")
        self.install("--no-build-isolation", "-e", str(ROOT))

    def compile(self, since: float = 0.0) -> None:
        """Compile Python's sources on all cores (pip uses one), and numba's functions.

        since: only packages whose folder changed at or after this time (seconds since 1970).
        Some files of packages are templates and can't be compiled, so failures don't count.
        """
        self.say("compiling")
        [packages] = self.folder.glob("lib/python*/site-packages")
        chosen = [str(p) for p in packages.iterdir() if p.stat().st_mtime >= since]
        command = [str(self.python), "-m", "compileall", "-qq", "-j", "0", *chosen]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if error := self.error_of("from rose.transfer import codec; codec.compile_all()"):
            raise Failed(f"rose/transfer/codec.py can't be compiled: {error}")

    def offers(self, pin: str, *options: str, within_s: float | None = None) -> bool:
        """True if pip, with these options, finds `pin` (NAME==VERSION) for this Python."""
        name, _, version = pin.partition("==")
        command = self._pip("index", "versions", name, *options)
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=within_s)
        except subprocess.TimeoutExpired:
            return False
        lines = asked.stdout.splitlines()
        [versions] = [line for line in lines if line.startswith("Available versions:")] or [""]
        return version in versions.replace(",", " ").split()

    def has(self, distribution: str) -> bool:
        """True if a distribution (NAME-VERSION) is installed."""
        return any(self.folder.glob(f"lib/python*/site-packages/{distribution}.dist-info"))

    def error_of(self, program: str) -> str:
        """The last line of the error with which `program` ends here; empty when it ends well."""
        command = [str(self.python), "-c", program]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        return lines[-1] if run.returncode else ""

    def size_gb(self) -> float:
        return sum(f.lstat().st_size for f in self.folder.rglob("*") if not f.is_dir()) / 1e9

    def _is_own(self) -> bool:
        """True if an earlier call has made it, or has begun to, or if it is a virtual environment
        without packages or with ROSE."""
        if (self.folder / MARK).exists() or any(self.folder.glob(".stamp-*")):
            return True
        if not (self.folder / "pyvenv.cfg").exists():
            return False
        found = self.folder.glob("lib/python*/site-packages/*.dist-info")
        names = {path.name.partition("-")[0] for path in found}
        return "rose_rl" in names or names <= {"pip", "setuptools", "wheel"}

    def _pip(self, *arguments: str) -> list[str]:
        options = ("--disable-pip-version-check", "--no-input")
        return [str(self.python), "-m", "pip", *options, *arguments]


def torch_pin() -> str:
    """torch's pin in requirements/cpu.txt, torch==VERSION."""
    lines = (LOCKS / "cpu.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def install_torch(env: Environment, index: str) -> None:
    """Install torch from the first place that offers it (see this file's docstring)."""
    pin = torch_pin()
    for_cpus = f"{pin}+cpu"
    have = pin.replace("==", "-")
    if env.has(f"{have}+cpu"):
        return env.say(f"{for_cpus} is installed")
    if env.has(have):
        env.say(f"{pin} is installed, a CUDA build; the libraries that it links:")
        return env.install("-r", str(LOCKS / "torch-cuda.txt"))
    before = env.size_gb()
    if env.offers(for_cpus):
        taken = "the build for CPUs that pip's own settings offer"
        env.say(f"torch: {taken}")
        env.install(for_cpus)
    elif index and env.offers(for_cpus, "--index-url", index, *IMPATIENT, within_s=PROBE_S):
        taken = f"the build for CPUs from {index}"
        env.say(f"torch: {taken}")
        env.install("--index-url", index, for_cpus, hint="; `make TORCH_INDEX=` skips this index")
    else:
        where = f"{index} can't be reached or has none" if index else "TORCH_INDEX is empty"
        taken = "the package index's CUDA build with CUDA's libraries, which computes on CPUs too"
        env.say(f"torch: pip's settings offer no build for CPUs, and {where}")
        env.say(f"torch: {taken} (about 2 GB to download)")
        env.install(pin, "-r", str(LOCKS / "torch-cuda.txt"))
    env.say(f"torch: {env.size_gb() - before:.1f} GB on disk")


def check(env: Environment, program: str) -> None:
    """Load the libraries that the ranks will load. Unpacks libnuma if the system lacks it. Raises
    `Failed` naming any other library that is missing."""
    env.say("checking that torch, vLLM's kernels and MPI load")
    error = env.error_of(program)
    if NUMA in error:
        unpack_numa(env)
        error = env.error_of(program)
    if error:
        raise Failed(
            f"the packages are installed, but can't be loaded: {error}\n"
            "    Where it names a file lib*.so*, the system lacks this library: install your "
            "distribution's package of it\n    (`apt-file search FILE` names it on Debian and "
            "Ubuntu) and run the same command again."
        )


def unpack_numa(env: Environment) -> None:
    """Unpack the system's own libnuma into the environment, from which all of its Pythons load it."""
    install = (
        "sudo apt-get install libnuma1 (Debian, Ubuntu), or numactl-libs (Red Hat, SUSE: libnuma1)"
    )
    folder = env.folder / "lib" / "system"
    got = subprocess.run(
        [ROOT / "scripts" / "get_libnuma.sh", folder], capture_output=True, text=True
    )
    if got.returncode:
        reason = (got.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Failed(
            f"the system lacks {NUMA}, which vLLM's kernels for CPUs need, and it can't be unpacked "
            f"here ({reason}).\n    It comes with: {install}. Then run the same command again."
        )
    [packages] = env.folder.glob("lib/python*/site-packages")
    path = (folder / NUMA).relative_to(env.folder)
    (packages / "rose_system_libraries.pth").write_text(PRELOAD.format(path=path), encoding="utf-8")
    env.say(f"the system lacks {NUMA}: unpacked into {folder}; system-wide it comes with {install}")


def set_up(env: Environment, kind: str, index: str) -> None:
    began = time.time()
    env.make()
    if kind == "cpu":
        install_torch(env, index)
        env.install_lock("cpu.txt", "about 2 GB on disk (a minute or two)")
        env.install_rose()
        env.compile()
        check(env, CHECK_CPU)
    elif kind == "gpu":
        env.install_lock("gpu.txt", "about 12 GB on disk (some minutes)")
        env.install_rose()
        env.compile()
        check(env, CHECK_GPU)
    else:
        env.install_lock("test.txt", "which only the tests need")
        env.compile(since=began)
    env.say(f"{env.folder} is complete: {env.size_gb():.1f} GB")


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[2] not in ("cpu", "gpu", "test"):
        print("usage: scripts/set_up.sh DIR cpu|gpu|test", file=sys.stderr)
        return 2
    env = Environment(Path(sys.argv[1]).absolute())
    if os.uname().machine != "x86_64":
        print(f"make: x86-64 is needed; this machine is {os.uname().machine}", file=sys.stderr)
        return 2
    for name in FOREIGN:
        os.environ.pop(name, None)
    try:
        set_up(env, sys.argv[2], os.environ.get("TORCH_INDEX", ""))
    # OSError: a full disk, a read-only checkout
    except (Failed, OSError, subprocess.CalledProcessError) as error:
        output = (getattr(error, "output", None) or b"").decode(errors="replace")[-2000:]
        print(f"make: {error}", output, sep="\n" if output else "", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmake: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
