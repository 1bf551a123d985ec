"""Sandboxes with the kernel's real features, as this user and as one without any right."""

import asyncio
import errno
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rose.parts.sandbox import Limits, Mount, Sandbox, SandboxError, Spec, check, gvisor, probe
from rose.parts.sandbox.backend import SESSION
from rose.parts.sandbox.cgroups import Groups, own_name
from rose.parts.sandbox.kernel import prctl
from rose.parts.sandbox.piped import Piped
from rose.parts.sandbox.users import COUNT, FIRST, RANGES, Ranges
from rose.parts.sandbox.within import enter

sys.path.insert(0, str(Path(__file__).parent))
import scenarios

from rose.parts.sandbox import Found
from rose.parts.sandbox.doctor import of_backends
from tests import processes
from tests.processes import ran

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
DEADLINE_S = 120.0
pytestmark = pytest.mark.usefixtures("loop")


# Those that `make unit` leaves to the slow run of all.
LONGER = (
    "there_is_no_network_but_loopback",
    "two_sandboxes_share_nothing",
    "a_check_is_beyond_reach",
    "a_check_runs_whatever_the_agent_makes_of_the_root",
    "a_check_has_what_the_image_had",
)
QUICK = [f.__name__ for f in scenarios.FAST if f.__name__ not in LONGER]


@pytest.mark.parametrize("name", QUICK)
async def test_a_sandbox(box, name):
    await getattr(scenarios, name)(box)
    await scenarios.still_alive(box)


@pytest.mark.slow
def test_all_scenarios_as_this_user_and_without_rights(play):
    for kind, found in (("fast", scenarios.FAST), ("slow", scenarios.SLOW)):
        assert play("scenarios.py", kind).count("passed") == len(found) > 5


def bearing(mark: str) -> list:
    """Those whose name is `mark`."""
    return [one for one in processes.bearing(mark) if processes.words(one)[:1] == [mark]]


def mounted() -> set[str]:
    """Other tests mount, too."""
    return set(Path("/proc/self/mountinfo").read_text().splitlines())


def groups_of(keeper: int) -> list[Path]:
    return [g for parent in Groups().parents for g in parent.glob(f"rose-{keeper}-*")]


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["host", "keeper", "both"])
def test_nothing_stays_behind_whoever_is_killed(killed):
    mark = f"rose-{secrets.token_hex(8)}"
    mounts = mounted()
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, HERE / "killed.py", mark]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        keeper, count = map(int, host.stdout.readline().split())
        processes.until(lambda: len(bearing(mark)) == 2 * count, "background processes")
        assert not [m for m in mounted() - mounts if " - overlay " in m or "rose" in m]
        if os.geteuid() == 0:
            assert groups_of(keeper)
        if killed == "both":
            os.kill(keeper, signal.SIGSTOP)  # so that it can't tidy up
        if killed != "keeper":
            host.kill()
        if killed != "host":
            os.kill(keeper, signal.SIGKILL)
        processes.until(lambda: not bearing(mark), "the end of the sandboxes' processes")
        processes.until(lambda: not processes.alive(keeper), "the keeper's end")
    finally:
        host.kill()
        host.wait()
    if killed == "host":
        assert not groups_of(keeper)
    made = probe.Keeper.start()  # the next one cleans up
    made.close()
    assert not groups_of(keeper)


# A keeper that can map no user into a sandbox.
UNMAPPED = """#!{python} -S
import sys
from rose.parts.sandbox import keeper, users

def refuse(process, *maps, groups):
    if process != "self":
        raise PermissionError("no map")
    mapped(process, *maps, groups=groups)

mapped, users.write_maps = users.write_maps, refuse
del sys.argv[1:-1]
keeper.main()
"""


async def test_a_sandbox_whose_users_cannot_be_mapped_leaves_no_process(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(UNMAPPED.format(python=sys.executable))
    python.chmod(0o755)
    with monkeypatch.context() as other:
        other.setattr(sys, "executable", str(python))
        made = probe.Keeper.start()
    try:
        for _ in range(2):
            with pytest.raises(SandboxError, match="no map"):
                await made.begin(Spec())
        here = psutil.Process(made.process.pid)
        processes.until(lambda: not here.children(), "the end of its first processes")
        assert here.num_fds() < 20
    finally:
        made.close()


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"image": "/nowhere"}, "image='/nowhere': no such folder"),
        ({"workdir": "app"}, "workdir='app': a path from the root"),
        ({"workdir": "/"}, "workdir='/': a path from the root"),
        ({"workdir": "/app/../usr"}, r"workdir='/app/\.\./usr': without \.\. and outside"),
        ({"workdir": "//lib/x"}, "workdir='//lib/x': without .* and outside of tests, logs"),
        ({"limits": Limits(disk_mib=0)}, r"limits\.disk_mib=0: a whole number above 0"),
        ({"limits": Limits(memory_mib=1.5)}, r"limits\.memory_mib=1\.5: a whole number"),
        ({"limits": Limits(cpus=float("nan"))}, r"limits\.cpus=nan: a number above 0"),
        ({"limits": Limits(cpus=True)}, r"limits\.cpus=True: a number above 0"),
    ],
)
def test_a_bad_spec_is_named(wrong, words):
    with pytest.raises(SandboxError, match=words):
        Spec(**wrong)


def test_an_unknown_backend_is_named(loop):
    with pytest.raises(SandboxError, match="backend='docker': there are auto, namespaces, gvisor"):
        loop.run(Sandbox.start(Spec(), "docker"))


def ran_below(script: str, program: str):
    """A Python program in a user namespace of its own, of which `script` sets limits that the
    machine keeps."""
    command = ["unshare", "-Ur", "bash", "-c", script, "-", sys.executable, "-c", program]
    return ran(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})


def test_a_switch_that_refuses_user_namespaces_is_named():
    start = "import asyncio; from rose.parts.sandbox import *; "
    start += "asyncio.run(Sandbox.start(Spec(), 'namespaces'))"
    done = ran_below('echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"', start)
    assert "user.max_user_namespaces=0 is in the way of user namespaces" in done.stderr


def second_version(tmp_path: Path, controllers: str, own: str = "job") -> Groups:
    """A tree like that of a delegated cgroup v2, which this machine may not have."""
    group = tmp_path / "fs" / own
    group.mkdir(parents=True, exist_ok=True)
    (group / "cgroup.controllers").write_text(controllers)
    (tmp_path / "own").write_text(f"0::/{own}\n")
    (tmp_path / "mounts").write_text(f"30 1 0:26 / {tmp_path}/fs rw - cgroup2 cgroup2 rw\n")
    return Groups(str(tmp_path / "own"), str(tmp_path / "mounts"))


def test_limits_of_cgroup_v2(tmp_path):
    groups = second_version(tmp_path, "cpu io memory pids\n")
    assert groups.lacking == {}
    assert (tmp_path / "fs/job/cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    groups.make("rose-1-2-3", Limits(memory_mib=64, processes=20, cpus=0.5), pid=77)
    made = tmp_path / "fs/job/rose-1-2-3"
    read = {path.name: path.read_text() for path in made.iterdir()}
    expected = {"memory.max": str(64 << 20), "pids.max": "28", "cpu.max": "50000 100000"}
    assert read == expected | {"cgroup.procs": "77"}


def test_a_group_that_can_pass_nothing_on_leaves_it_to_the_one_above(tmp_path):
    """The kernel refuses the write where a group has processes; here a folder is in its place."""
    (tmp_path / "fs/job/host/cgroup.subtree_control").mkdir(parents=True)
    alone = second_version(tmp_path, "memory pids\n", "job/host")
    assert "DelegateSubgroup=host COMMAND" in alone.lacking["memory"]
    (tmp_path / "fs/job/cgroup.controllers").write_text("cpu memory pids\n")
    groups = second_version(tmp_path, "memory pids\n", "job/host")
    assert groups.lacking == {}
    groups.make("rose-1-2-3", Limits(), pid=77)
    assert (tmp_path / "fs/job/rose-1-2-3/pids.max").read_text() == "136"


def test_only_groups_whose_keeper_is_gone_are_removed(tmp_path):
    groups = second_version(tmp_path, "pids\n")
    assert set(groups.lacking) == {"memory", "cpu"}
    alive, (*_, namespace) = f"{own_name()}-1", own_name().split("-")
    gone = f"rose-{os.getpid()}-1-{namespace}-1"
    # A keeper of a container with the same control groups, whose process ids are others.
    inside = f"rose-{os.getpid()}-1-{int(namespace) + 1}-1"
    for name in (alive, gone, inside, "rose-notours", "other"):
        (tmp_path / "fs/job" / name).mkdir()
    assert groups.remove_stale() == [gone]
    expected = {alive, inside, "rose-notours", "other"}
    assert {p.name for p in (tmp_path / "fs/job").iterdir() if p.is_dir()} == expected


def test_no_two_sandboxes_of_a_machine_have_a_user_in_common():
    one, other = Ranges(), Ranges()
    taken = [ranges.take() for ranges in (one, other) for _ in range(40)]
    assert len(set(taken)) == 80 and all(0 <= x - FIRST < RANGES * COUNT for x in taken)
    assert all((x - FIRST) % COUNT == 0 for x in taken)
    one.release(taken[0])
    assert one.take() == taken[0]


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.EMFILE, errno.ENOMEM, errno.EIO])
async def test_a_file_that_the_sandbox_can_not_open_is_no_missing_file(box, monkeypatch, number):
    ended = []

    async def order(**message):
        if message["do"] == "open":
            raise OSError(number, "x")
        ended.append(message)

    with monkeypatch.context() as patch:
        patch.setattr(box.shell, "_order", order)
        for what in (box.read_file("/app/x"), box.write_file("/app/x", b"")):
            with pytest.raises(SandboxError, match="'/app/x' could not be opened"):
                await what
    assert ended == [{"do": "stop", "since": 0}] * 2, "the agent's processes had their turn to go"


async def test_a_check_whose_process_is_ended_is_no_verdict(box, tmp_path):
    keeper = psutil.Process(box.shell.keeper.process.pid)
    others = set(keeper.children())
    check = asyncio.ensure_future(box.check(["/bin/bash", "-c", "sleep 1000"], str(tmp_path)))
    while not (found := set(keeper.children()) - others):
        await asyncio.sleep(0.01)
    found.pop().kill()
    # Whether it was a member of the sandbox's cgroup by then is a matter of moments.
    with pytest.raises(SandboxError, match="the checker process was killed|No such process"):
        await check
    await scenarios.still_alive(box)


def test_work_does_not_begin_if_its_parent_was_killed_as_it_was_forked(monkeypatch):
    here, asked = os.getpid(), prctl

    def ask_late(*what):
        if (parent := os.getppid()) == here:
            signal.pause()  # The child kills this process.
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            time.sleep(0.001)
        asked(*what)

    for name in ("setresgid", "setresuid"):
        monkeypatch.setattr(os, name, lambda *_: None)
    monkeypatch.setattr("rose.parts.sandbox.kernel.prctl", ask_late)
    answer, to = os.pipe()
    if (outer := os.fork()) == 0:
        enter([], 0, to, lambda: os.write(to, b"ran"))
    os.close(to)
    os.waitpid(outer, 0)
    with os.fdopen(answer, "rb") as said:
        assert said.read() == b""


def test_what_is_packed_is_unpacked_and_nothing_leaves_its_folder(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/run.sh").write_bytes(b"\x00x")
    (tmp_path / "a/b/run.sh").chmod(0o755)
    check.unpack(check.pack(str(tmp_path / "a")), str(tmp_path / "out"))
    made = tmp_path / "out/b/run.sh"
    assert made.read_bytes() == b"\x00x" and made.stat().st_mode & 0o777 == 0o755
    bad = check.pack(str(tmp_path / "a")).replace(b"b/run.sh", b"../run.s")
    with pytest.raises(Exception, match="below its folder|checksum"):
        check.unpack(bad, str(tmp_path / "out"))


SPEC = Spec(workdir="/work", mounts=(Mount("/data", "/mnt/data"),), environment={"A": "b c"})


def test_gvisors_bundle(tmp_path):
    gvisor.Runsc.prepare(SPEC, tmp_path)
    read = json.loads((tmp_path / "bundle/config.json").read_text())
    assert read["process"]["cwd"] == "/work" and "A=b c" in read["process"]["env"]
    assert read["process"]["noNewPrivileges"] and "CAP_SYS_ADMIN" not in str(read)
    data = next(m for m in read["mounts"] if m["destination"] == "/mnt/data")
    assert data["source"] == "/data" and data["options"] == ["rbind", "ro"]
    assert read["linux"]["resources"]["memory"]["limit"] == 1 << 30
    assert {n["type"] for n in read["linux"]["namespaces"]} >= {"network", "pid"}
    argv = gvisor.Runsc.session_command(SPEC, tmp_path)
    assert "-network=none" in argv and ("unshare" in argv) == (os.geteuid() != 0)


def test_a_backend_that_is_not_installed_is_named(loop, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="runsc is not installed"):
        loop.run(Sandbox.start(Spec(), "gvisor"))


class Plain:
    """bash without walls: what `Piped` makes of a program's commands, without the program."""

    NAME, PROGRAM, keeps_files = "plain", "bash", True

    @staticmethod
    def prepare(spec, folder):
        (folder / "work").mkdir()

    @staticmethod
    def setup_commands(spec, folder):
        return []

    @staticmethod
    def session_command(spec, folder):
        return ["/bin/bash", "--norc", "--noprofile", "-c", f"cd {folder}/work\n{SESSION}"]

    @staticmethod
    def exec_command(spec, folder, argv):
        return ["/usr/bin/env", "-C", f"{folder}/work", *argv]

    @staticmethod
    def end_commands(folder):
        return []


class Broken(Plain):
    """A program that fails as it is to run another in its sandbox."""

    @staticmethod
    def exec_command(spec, folder, argv):
        return ["/bin/sh", "-c", "echo it broke >&2; exit 128"]


async def test_a_session_on_three_pipes():
    shell = await Piped(Plain, Spec()).begin()
    async with Sandbox(shell, Spec(), "plain") as box:
        await box.run("A=1; echo x > file", DEADLINE_S)
        assert (await box.run("echo $A; cat file; false", DEADLINE_S)).output == "1\nx\n"
        late = await box.run("while :; do sleep 1; done", 0.1)
        assert late.restarted and "its shell had to be ended" in late.words()
        assert (await box.run("cat file; exit 1", DEADLINE_S)).restarted
        assert await box.read_file("file") == b"x\n"
        await box.write_file("deep/er", b"\x00")
        assert await box.read_file("deep/er") == b"\x00"
        with pytest.raises(OSError):
            await box.read_file("none")
        shell.program = Broken
        for what in (
            box.read_file("file"),
            box.write_file("file", b""),
            shell.fresh(["/bin/true"], b"", "/tests", [], 99, DEADLINE_S),
        ):
            with pytest.raises(SandboxError, match="it broke"):
                await what


@pytest.mark.parametrize(
    "program, words",
    [
        ("echo warned >&2; exec sleep 1000", "bash: warned\nits shell was not there within 3 s"),
        ("exec yes >&2", "bash: .*y\ny\n"),
        ("exec <&-; echo refused >&2", "bash: refused"),
    ],
)
def test_a_shell_that_never_answers_is_given_up(loop, monkeypatch, program, words):
    class Silent(Plain):
        @staticmethod
        def session_command(spec, folder):
            return ["/bin/bash", "-c", program]

    if "sleep" in program:
        monkeypatch.setattr(
            "rose.parts.sandbox.piped.START_S", 3.0
        )  # the sandbox has warned by now
    shell = Piped(Silent, Spec())
    with pytest.raises(SandboxError, match=re.compile(words, re.DOTALL)):
        loop.run(asyncio.wait_for(shell.begin(), DEADLINE_S))
    assert not shell.folder.exists() and shell.codes == -1


@pytest.mark.slow
def test_a_machine_without_criu_says_so_before_a_run(no_criu):
    words = probe.choose("namespaces").account
    assert "; not here: " in words and "captures have no processes: no CRIU: /nonexistent" in words


def test_each_backend_of_sandboxes_is_named_with_what_is_lost():
    whole = Found("namespaces", "with root")
    absent = Found("gvisor", "", "runsc is not installed")
    first, second = of_backends([whole, absent])
    assert (first.state, first.words) == ("ok", "with root (backend=auto takes it)")
    assert (second.state, second.words) == ("ok", "not used: runsc is not installed")
    refused = Found("namespaces", "", "user.max_user_namespaces=0 is in the way")
    first, second = of_backends([refused, Found("gvisor", "works", "", ("no pids",))])
    assert first.state == "warning" and refused.problem in first.words
    assert second.state == "warning" and second.remedy == "no pids"
    assert second.words == "works (backend=auto takes it)"
    first, second = of_backends([refused, absent])
    assert first.remedy == second.remedy == "env=terminal can't run here"


async def test_an_error_that_ends_process_1_is_named(box):
    with pytest.raises(SandboxError, match="first process has ended"):
        await box.shell.line.order({"do": "nonsense"})
    with pytest.raises(SandboxError, match=r"ended \(ValueError: .* no use for nonsense\)"):
        await box.run("true", 60)
