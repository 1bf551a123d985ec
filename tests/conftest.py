"""What every test shares: the variables of a CPU run, set before anything reads them, and composed
configurations."""

import asyncio
import functools
import inspect
import os
import pickle
import re
import signal
import sys
from pathlib import Path

CPU_VARIABLES = {
    "OMP_WAIT_POLICY": "passive",
    # Tests run on all cores already. And an engine is forked from this process, which must not have
    # a pool of threads then (rose/engine/vllm_engine.py).
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
for name, value in CPU_VARIABLES.items():
    os.environ.setdefault(name, value)

sys.path.insert(0, str(Path(__file__).parent))

import hydra_once
import pytest
from disk import Disk
from hydra import compose, initialize_config_dir
from hypothesis import settings
from omegaconf import DictConfig, OmegaConf

from rose.front import own_sections
from rose.launch import exclusions
from rose.processes import importing
from tests.installed import Installed

# Speed is measured in benchmarks, not in tests; and the same examples each time, so that a failure
# is one of the commit that has it. Others are drawn with --hypothesis-profile=default.
settings.register_profile("rose", deadline=None, derandomize=True)
settings.load_profile("rose")

CONF = Path(__file__).resolve().parents[1] / "conf"
# Folders whose slow tests take longest, which begin first, so that two processes end together.
SLURM = "tests/slurm"
LONGEST = (SLURM, "tests/job", "tests/scripts", "tests/engine", "tests/trainer")
LONGEST += ("tests/parts/lending",)


def pytest_configure():
    """SIGTERM ends the tests as Ctrl-C does: fixtures end what they have started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """For `--dist loadfile`: the tests of a file share a process and so its warm engines; those of
    Slurm's dev cluster, of which a machine has one, share theirs."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SLURM if nodeid.startswith(f"{SLURM}/") else super()._split_scope(nodeid)

    return ByFile(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Which imports nearly everything."""
    with importing("mlflow"):  # of DeepSpeed's autotuner, as in rose/main.py
        return (yield)


def pytest_ignore_collect(collection_path, config):
    """`-m "not slow"` does not import files that are slow as a whole, and vLLM for them."""
    if config.option.markexpr != "not slow" or not collection_path.name.startswith("test_"):
        return None
    return (
        bool(re.search(r"^pytestmark = \[?pytest\.mark\.slow", collection_path.read_text(), re.M))
        or None
    )


def pytest_collection_modifyitems(items):
    """Slow tests in the order of `LONGEST`."""

    def begins(item) -> int:
        of = [i for i, folder in enumerate(LONGEST) if item.nodeid.startswith(f"{folder}/")]
        return of[0] if of and item.get_closest_marker("slow") else len(LONGEST)

    items.sort(key=begins)


hydra_once.install()


# Both of pickles: they are copied in less time than by copy.deepcopy.
@functools.cache
def _composed(groups: tuple[str, ...]) -> bytes:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", list(groups))
    OmegaConf.set_struct(composed, False)
    return pickle.dumps(composed)


@functools.lru_cache(200)
def _changed(overrides: tuple[str, ...]) -> bytes:
    groups = tuple(o for o in overrides if (CONF / re.split("[@=]", o.lstrip("+"))[0]).is_dir())
    composed: DictConfig = pickle.loads(_composed(groups))
    for override in overrides:
        if override.startswith("~"):
            parent, _, key = override[1:].rpartition(".")
            del OmegaConf.select(composed, parent)[key]
        elif override not in groups:
            composed.merge_with_dotlist([override.lstrip("+")])
    return pickle.dumps(OmegaConf.to_container(composed, resolve=True))


def compose_tree(*overrides: str) -> dict:
    """conf/ with these overrides ("a=1 b=2" are two), as plain containers. Hydra composes each choice
    of groups once (a third of a second); single keys (`a.b=1`, `+a.b=1`, `~a.b`) are set afterwards,
    which is Hydra's order too."""
    each = [one for words in overrides for one in re.split(r" +(?=[+~]*[a-z][\w./@]*=)", words)]
    return own_sections(pickle.loads(_changed(tuple(each))))


# As nvidia-smi -L prints it on a box of eight.
EIGHT_GPUS = "".join(
    f"GPU {i}: NVIDIA H200 (UUID: GPU-{i}c89852c-8ec8-92b7-dd3b-1ebe33b02c5{i})\n" for i in range(8)
)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test may be a coroutine, which has its module's DEADLINE_S, or five minutes."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def within_time():
        async with asyncio.timeout(getattr(pyfuncitem.module, "DEADLINE_S", 300.0)):
            await pyfuncitem.obj(**{n: pyfuncitem.funcargs[n] for n in names})

    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(within_time())
    return True


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """ROSE from a wheel, in an environment of its own."""
    return Installed(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """nvidia_smi(listing, variable): one that prints `listing`, and this process's
    CUDA_VISIBLE_DEVICES (None: unset)."""

    def make(listing: str = EIGHT_GPUS, variable: str | None = None) -> None:
        folder = tmp_path / "nvidia"
        folder.mkdir(exist_ok=True)
        (folder / "listing").write_text(listing)
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat {folder}/listing\n")
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        if variable is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)

    return make


@pytest.fixture
def tree():
    """tree("trainer.steps=3", ...) -> the composed tree, unchecked."""
    return compose_tree


@pytest.fixture
def make_config():
    """make_config("trainer.steps=3", ...) -> the `Config`, checked as the launcher does."""
    return lambda *overrides: exclusions.from_dict(compose_tree(*overrides))


@pytest.fixture
def disk(tmp_path):
    """A small real disk, `disk.path`, that can be full, broken and mended."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a disk of its own")
    made = Disk(tmp_path)
    yield made
    made.unmount("--lazy")  # a failed test may still hold a file
