"""scripts/set_up.sh and set_up.py without an installation: which Python and which torch they take."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.processes import ran

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts"
spec = importlib.util.spec_from_file_location("set_up", SCRIPTS / "set_up.py")
set_up = importlib.util.module_from_spec(spec)
spec.loader.exec_module(set_up)

PIN = set_up.torch_pin()
# A port of this machine at which nobody listens.
UNREACHABLE = "http://127.0.0.1:9/whl/cpu"


def wheel(folder: Path, local: str) -> None:
    """A wheel of torch without any code, as a folder of pip or as an index has it."""
    version = PIN.partition("==")[2] + local
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as file:
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for name, text in {"METADATA": metadata, "WHEEL": tags, "RECORD": ""}.items():
            file.writestr(f"torch-{version}.dist-info/{name}", text)


def index(folder: Path, local: str) -> str:
    """A package index in a folder, with a torch; its address."""
    wheel(folder / "torch", local)
    [made] = (folder / "torch").iterdir()
    (folder / "torch" / "index.html").write_text(f'<a href="{made.name}">{made.name}</a>')
    return folder.as_uri()


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """pip(find_links): pip's own settings, which name an empty package index, and this folder."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    (tmp_path / "nothing").mkdir()

    def configure(find_links: Path | None = None) -> None:
        lines = ["[global]", f"index-url = {(tmp_path / 'nothing').as_uri()}"]
        lines += [f"find-links = {find_links}"] * bool(find_links)
        (tmp_path / "pip.conf").write_text("\n".join(lines) + "\n")

    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    configure()
    return configure


class Recorded(set_up.Environment):
    """An environment into which nothing is installed, with the pip of the tests' own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.python, self.installed = Path(sys.executable), []

    def install(self, *arguments: str, hint: str = "") -> None:
        self.installed.append(arguments)


def taken(tmp_path, address: str) -> tuple[str, ...]:
    env = Recorded(tmp_path / "env")
    set_up.install_torch(env, address)
    [arguments] = env.installed
    return arguments


def test_pips_own_settings_come_before_torchs_index_of_builds_for_cpus(pip, tmp_path, capsys):
    address = index(tmp_path / "index", "+cpu")
    assert taken(tmp_path, address) == ("--index-url", address, f"{PIN}+cpu")
    assert f"the build for CPUs from {address}" in capsys.readouterr().out
    wheel(tmp_path / "wheels", "+cpu")
    pip(find_links=tmp_path / "wheels")
    assert taken(tmp_path, address) == (f"{PIN}+cpu",)
    assert "pip's own settings offer" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["unreachable", "another", "none"])
def test_then_the_package_indexs_build_with_its_libraries(pip, tmp_path, capsys, kind):
    addresses = {"unreachable": UNREACHABLE, "another": index(tmp_path / "index", ""), "none": ""}
    libraries = str(REPOSITORY / "requirements" / "torch-cuda.txt")
    assert taken(tmp_path, addresses[kind]) == (PIN, "-r", libraries)
    said = capsys.readouterr().out
    assert "CUDA build with CUDA's libraries" in said and (addresses[kind] or "empty") in said


@pytest.mark.parametrize("local, installs", [("+cpu", 0), ("", 1)])
def test_an_installed_one_stays_and_a_cuda_build_gets_its_libraries(tmp_path, local, installs):
    packages = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    (packages / f"{PIN.replace('==', '-')}{local}.dist-info").mkdir(parents=True)
    env = Recorded(tmp_path / "env")
    set_up.install_torch(env, UNREACHABLE)
    assert len(env.installed) == installs


def test_a_pip_that_fails_is_quoted(tmp_path):
    env = set_up.Environment(tmp_path)
    env.python = Path(sys.executable)
    with pytest.raises(set_up.Failed, match=r"set-up\.log has all of it.*(.|\n)*no-such-wheel"):
        env.install("--no-index", "no-such-wheel")


def test_a_folder_of_something_else_is_not_cleared(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(set_up.Failed, match="has files or packages of something else"):
        set_up.Environment(tmp_path).make()
    assert (tmp_path / "thesis.tex").exists()


ENVIRONMENTS = {
    "rose-set-up": True,  # an interrupted call leaves this
    ".stamp-run pyvenv.cfg": True,
    "pyvenv.cfg lib/python3.11/site-packages/pip-24.0.dist-info": True,
    "pyvenv.cfg lib/python3.11/site-packages/numpy-2.0.dist-info": False,
    "pyvenv.cfg lib/python3.10/site-packages/rose_rl-0.1.0.dist-info": True,
    "lib/python3.11/site-packages/pip-24.0.dist-info": False,
}


@pytest.mark.parametrize("files, own", ENVIRONMENTS.items())
def test_an_environment_of_other_packages_is_not_taken(tmp_path, files, own):
    for name in files.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert set_up.Environment(tmp_path)._is_own() == own


def test_what_an_interrupted_call_has_left_is_replaced(tmp_path, monkeypatch):
    (tmp_path / set_up.MARK).touch()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "half").touch()
    monkeypatch.setattr(set_up.Environment, "install", lambda *_: None)
    set_up.Environment(tmp_path).make()
    assert not (tmp_path / "lib" / "half").exists() and (tmp_path / set_up.MARK).exists()
    assert (tmp_path / "bin" / "python").exists()


# As cloud images of Ubuntu 24.04 have it.
STANZA = "Types: deb\nURIs: http://{}.example\nSuites: noble{}\n".format
CLOUD = "# See the release notes for how to upgrade.\n\n## The distribution\n"
CLOUD += f"{STANZA('archive', ' noble-updates noble-backports')}Components: main universe\n\n"
CLOUD += f"{STANZA('security', '-security')}Components: main\n"


@pytest.mark.parametrize("before", ["a-docker.sources", "zz-deadsnakes.sources"])
def test_the_systems_own_source_is_found_among_others_and_behind_comments(tmp_path, before):
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (parts / before).write_text(STANZA("other", ""))
    (parts / "ubuntu.sources").write_text(CLOUD)
    (tmp_path / "os-release").write_text("VERSION_CODENAME=noble\n")
    script = (SCRIPTS / "other_suite.sh").read_text()
    script = script.replace("/etc/os-release", f"{tmp_path}/os-release")
    script = script.replace("/etc/apt", str(tmp_path))
    call = f'fail() {{ echo "$*"; exit 1; }}\n{script}\nown_sources trixie {tmp_path}'
    done = ran(["bash", "-c", call], timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = "Types: deb deb-src\nURIs: http://archive.example\nSuites: trixie\n"
    made = (tmp_path / "debian.sources").read_text()
    assert made.strip() == f"{expected}Components: main universe"


def python(folder: Path, version: str, has_venv: bool = True) -> str:
    """A program that answers set_up.sh's questions, and prints what it is asked to run."""
    file = folder / f"python-{version}"
    file.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f"*version_info*) echo {version} ;;\n*ensurepip*) exit {int(not has_venv)} ;;\n"
        '*) echo "ran $0 $*" ;;\nesac\n'
    )
    file.chmod(0o755)
    return str(file)


def run(tmp_path, candidates: str) -> subprocess.CompletedProcess:
    command = [str(SCRIPTS / "set_up.sh"), str(tmp_path / "env"), "cpu"]
    return ran(command, env=os.environ | {"PYTHON": candidates}, timeout=60)


def test_each_locked_python_sets_up_and_one_that_is_not_or_has_no_venv_is_refused(tmp_path):
    old = python(tmp_path, "3.10")
    for version in ("3.11", "3.12", "3.13"):
        done = run(tmp_path, f"/nowhere/python {old} {python(tmp_path, version)}")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"ran {tmp_path}/python-{version} {SCRIPTS}/set_up.py")
    done = run(tmp_path, f"{old} /nowhere/python")
    assert done.returncode == 2 and "one of Python 3.11 3.12 3.13 is needed" in done.stderr
    assert f"'{old}' is 3.10, '/nowhere/python' is none" in done.stderr
    done = run(tmp_path, python(tmp_path, "3.13", has_venv=False))
    assert done.returncode == 2 and "sudo apt-get install python3.13-venv" in done.stderr
