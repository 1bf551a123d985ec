"""env=terminal: task folders, the ladder, and verdicts on what an episode leaves behind."""

import ast
import asyncio
import contextlib
import errno
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest

from rose import protocol as p
from rose.agent import envs
from rose.agent.envs import _ladder
from rose.agent.envs.base import Action, ToolCall
from rose.agent.host import open_store
from rose.agent.snapshots import Snapshots
from rose.config import ConfigError
from rose.observe.recorder import NullRecorder
from rose.parts.doctor import machine
from rose.parts.sandbox import SandboxError
from rose.parts.sandbox.envs import _tasks, _undo
from rose.parts.sandbox.envs._host_store import HostStore
from rose.parts.sandbox.envs.terminal import Terminal
from rose.processes import mark
from scripts.sandbox import make_repair_tasks
from tests.agent.hosted import Hosted
from tests.made import environment

REPOSITORY = Path(__file__).resolve().parents[3]


def bash(command):
    return Action("", ToolCall("bash", {"command": command}))


def play(seed, *commands, action=None, **args):
    """The steps of one episode that ends without a call."""

    async def go():
        env = Terminal(**args)
        try:
            start = await env.reset(seed)
            steps = [await env.step(bash(each)) for each in commands]
            return start, [*steps, await env.step(action or Action("done"))]
        finally:
            await env.close()

    return asyncio.run(go())


def task(root: Path, name: str, test: str = "exit 0\n", toml: str = ""):
    folder = root / name
    for part in ("tests", "environment"):
        (folder / part).mkdir(parents=True)
    for path, text in (("instruction.md", "Do."), ("tests/test.sh", test), ("task.toml", toml)):
        (folder / path).write_text(text)
    return folder


def with_shell(folder: Path):
    """A task with an image of its own that has a shell, if a broken one."""
    (folder / "environment/rootfs/bin").mkdir(parents=True)
    (folder / "environment/rootfs/bin/bash").symlink_to("/nowhere")
    return folder


def test_a_demonstration_without_noise_solves_its_rung_and_another_command_does_not():
    for kind in _ladder.RUNGS:
        rung = _ladder.draw(6, (kind,))
        right = _ladder.demonstrate(rung, 0.0, random.Random(1))
        for command, solved in ((right, True), ("true", False)):
            start, steps = play(6, command, rungs=[kind])
            assert start.messages[-1]["content"] == rung.instruction
            last = steps[-1]
            assert last.done and (last.success, last.reward) == (solved, float(solved))


async def test_a_sandbox_that_fails_gives_no_reward(monkeypatch):
    """A missing file is the agent's failure, one that can't be opened is the sandbox's."""
    env = Terminal(rungs=["replace"])
    await env.reset(6)
    order = env.box.shell._order

    async def failing(**message):
        if message["do"] == "open":
            raise OSError(errno.ETOOMANYREFS, "x")
        return await order(**message)

    monkeypatch.setattr(env.box.shell, "_order", failing)
    with pytest.raises(SandboxError, match="could not be opened"):
        await env.step(Action("done"))
    monkeypatch.undo()
    await env.box.run(f"rm {env._rung.target}", 60)
    assert (await env.step(Action("done"))).reward == 0
    await env.close()


BROKEN = {  # a task's name: one of its files, what that has, and what is said of it
    "silent": ("instruction.md", b" \n", "no instruction.md, or an empty one"),
    "untested": ("tests/test.sh", None, "no tests/test.sh"),
    "imaged": ("task.toml", b'[environment]\ndocker_image = "debian:12"\n',
               "environment.docker_image='debian:12' is missing"),
    "built": ("environment/Dockerfile", b"FROM x\nRUN y\n",
              "environment/Dockerfile is not built here"),
    "timed": ("task.toml", b"[agent]\ntimeout_sec = -1\n",
              "task.toml: agent.timeout_sec=-1 is no number above 0"),
    "torn": ("task.toml", b"[agent\n", "task.toml: "),
    "windows": ("tests/test.sh", b"exit 0\r\n", "tests/test.sh has Windows line ends"),
    "old": ("instruction.md", b"Gr\xf6\xdfe\n", "instruction.md: it is not UTF-8"),
}  # fmt: skip


def test_every_broken_task_is_named_before_anything_starts(tmp_path):
    task(tmp_path, "fine")
    (task(tmp_path, "marked") / "task.toml").write_bytes(b"\xef\xbb\xbf[agent]\n")
    for name, (path, content, _) in BROKEN.items():
        file = task(tmp_path, name) / path
        file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        envs.check(environment("terminal", tasks=str(tmp_path)))
    words = str(error.value)
    assert words.startswith(f"env.args.tasks={str(tmp_path)!r}: ")
    for name, (*_, expected) in BROKEN.items():
        assert f"task {name}: {expected}" in words
    # A byte order mark is no part of a file's text.
    assert "task marked" not in words and "task fine" not in words


@pytest.mark.parametrize(
    "toml, words",
    [
        ("agent = 3", r"task\.toml: agent=3: a table"),
        ("[verifier]\ntimeout_sec = nan", r"verifier\.timeout_sec=nan is no number above 0"),
        ("[environment]\ncpus = inf", r"environment\.cpus=inf is no number above 0"),
        ("[environment]\nmemory_mb = 99.5", r"environment\.memory_mb=99\.5 is no whole number"),
        ("[environment]\nworkdir = '/usr/x'", r"environment\.workdir='/usr/x': without"),
        ("[environment]\nworkdir = '/a/../usr'", r"environment\.workdir='/a/\.\./usr': without"),
        ("[environment]\nworkdir = 3", r"environment\.workdir='3': a path from the root"),
        ("[verifier]\ntimeout_sec = 900", r"timeout_sec=900 is not below env\.step_timeout_s=900"),
        ("[environment]\nstorage_mb = 1000", "disk of 1000 MiB takes memory of 1064 MiB at least"),
    ],
)
def test_a_task_that_could_not_run_is_named_before_the_run(tmp_path, toml, words):
    task(tmp_path, "wrong", toml=toml)
    with pytest.raises(ConfigError, match=f"task wrong: .*{words}"):
        Terminal(tasks=str(tmp_path)).preflight(900.0)


@pytest.mark.slow
def test_an_image_without_bash_and_a_machine_without_its_backend_are_named(tmp_path, monkeypatch):
    (task(tmp_path, "bare") / "environment/rootfs/etc").mkdir(parents=True)
    with pytest.raises(ConfigError, match="task bare: environment/rootfs has no /bin/bash"):
        Terminal(tasks=str(tmp_path))
    shutil.rmtree(tmp_path / "bare")
    with_shell(task(tmp_path, "bare"))
    Terminal(tasks=str(tmp_path)).preflight(900.0)
    with pytest.raises(ConfigError, match=r"env\.args\.command_s=30: below env\.step_timeout_s=30"):
        Terminal().preflight(30.0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="env.args.backend='gvisor': .*runsc is not installed"):
        Terminal(backend="gvisor").preflight(900.0)


def test_no_tasks_and_bad_arguments_are_named(tmp_path):
    for args, words in (
        ({"tasks": str(tmp_path)}, "no task folders in it"),
        ({"tasks": "/nowhere"}, "no such folder"),
        ({"rungs": ["climb"]}, "a list of some of find, print, replace"),
        ({"backend": "docker"}, "there are auto, namespaces"),
        ({"undo": "yes"}, "undo='yes': true or false"),
        ({"cpus": 0}, "cpus=0: a number above 0"),
    ):
        with pytest.raises(ConfigError, match=f"env.args.*{words}"):
            envs.build(environment("terminal", **args))
    assert "undo" not in Terminal().tools


def test_tasks_are_split_and_none_is_in_both(tmp_path):
    for i in range(40):
        task(tmp_path, f"task-{i}")
    train, held_out = _tasks.load(str(tmp_path))
    assert len(train) + len(held_out) == 40 and held_out
    assert not {t.name for t in train} & {t.name for t in held_out}


def test_an_image_of_another_user_is_a_doubt(tmp_path, monkeypatch):
    task(tmp_path, "bare")
    with_shell(task(tmp_path, "whole"))
    assert Terminal(tasks=str(tmp_path)).training_doubt == ""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    found = Terminal(tasks=str(tmp_path)).training_doubt
    assert "rootfs of 1 tasks (whole) has files of other users than 12345" in found


def test_the_verdict_is_the_number_that_the_tests_write(tmp_path):
    limits = "[environment]\nworkdir = '/work'\nmemory_mb = 300\n"
    folder = task(tmp_path, "half", "cat state > /logs/verifier/reward.txt; exit 1", limits)
    (folder / "environment/state").write_text("0.25\n")
    assert play(2, "pwd; ls", tasks=str(tmp_path))[1][-2].observation == "/work\nstate"
    for written, reward in (("0.5", 0.5), ("7", 1.0), ("x", 0.0)):
        _, steps = play(2, f"echo {written} > state", tasks=str(tmp_path))
        assert steps[-1].reward == reward and steps[-1].success == (reward == 1)
    _, steps = play(2, "rm state; echo 1 > /logs/verifier/reward.txt", tasks=str(tmp_path))
    assert steps[-1].reward == 0


@pytest.mark.slow
def test_tests_that_can_not_judge_are_found_before_a_run(tmp_path, make_config):
    config = make_config("+experiment=terminal", "env.step_timeout_s=700")
    assert machine.tasks(config) == [], "the ladder has none"
    config.env.args["tasks"] = str(tmp_path)
    task(tmp_path, "fine", test="exit 1\n")
    assert [found.state for found in machine.tasks(config)] == ["ok"]
    task(tmp_path, "hangs", test="sleep 1000\n", toml="[verifier]\ntimeout_sec = 0.2")
    task(tmp_path, "floods", test="yes\n")
    task(tmp_path, "given")
    with_shell(task(tmp_path, "bare"))
    large = task(tmp_path, "large", toml="[environment]\nstorage_mb = 1")
    (large / "environment/data").write_bytes(bytes(2 << 20))
    _tasks.load.cache_clear()
    [found] = machine.tasks(config)
    assert (found.state, found.part) == ("failed", "env, 6 tasks")
    bare, floods, given, hangs, large = found.words.split("; task ")
    assert bare.startswith("task bare: its shell runs no command: ")
    assert "hangs: its tests were stopped: they don't end within verifier.timeout_sec=0.2" in hangs
    assert "No space left on device" in large
    assert "or never stop printing" in floods and given == "given is passed before its agent begins"


@pytest.mark.slow
def test_tests_that_hang_in_a_run_are_named_in_its_log(tmp_path, capsys):
    task(tmp_path, "hangs", test="sleep 1000\n", toml="[verifier]\ntimeout_sec = 0.2")
    for _ in range(2):
        _, (last,) = play(0, tasks=str(tmp_path))
        assert last.done and last.reward == 0
    assert capsys.readouterr().out.count("task hangs: its tests were stopped") == 1


async def test_a_file_is_edited_where_the_text_stands_once():
    def edit(old, new, path="/app/apple"):
        return Action("", ToolCall("edit_file", {"path": path, "old": old, "new": new}))

    rung = _ladder.draw(6, ("replace",))
    env = Terminal(rungs=["replace"], edit_file=True)
    start = await env.reset(6)
    assert [t["function"]["name"] for t in start.tools] == ["bash", "edit_file"]
    _, before, after, _ = rung.command.split()[2].split("/")
    missing = await env.step(edit("no such word", "x"))
    assert missing.invalid and "has old 0 times" in missing.observation
    nowhere = await env.step(edit("a", "b", "/app/none"))
    assert nowhere.invalid and "No such file" in nowhere.observation
    await env.box.write_file("/app/long", b"begin" + bytes(1 << 20))
    for path, old, words in (
        ("/app/long", "begin", "/app/long: edit_file takes files of 1 MiB at most."),
        ("/app/" + "x" * 200_000, "a", "File name too long"),
        ("/app/\ud800", "\ud800", "/app/?: No such file"),
    ):
        refused = await env.step(edit(old, "b", path))
        assert refused.invalid and words in refused.observation
    assert (await env.step(edit(before, after, f"/app/{rung.target}"))).observation == "Done."
    assert (await env.end()).success
    await env.close()


def repairs(folder, count):
    """`count` tasks to train on and hold out, in `folder`, which is empty."""
    folder.rmdir()  # It must not exist.
    options = {"--out": str(folder), "--count": count, "--held-out": "1", "--seed": "3"}
    make_repair_tasks.main([word for option in options.items() for word in option])
    return _tasks.load(str(folder))


@pytest.mark.slow
def test_repair_tasks_are_solved_by_the_module_as_it_was_and_by_nothing_less(tmp_path):
    train, held_out = repairs(tmp_path, "3")
    assert (len(train), len(held_out)) == (2, 1)
    modules = [path for t in (*train, *held_out) for path in t.folder.glob("environment/*.py")]
    broken = [path for path in modules if not path.name.startswith("test_")]
    whole = {p.read_text() for p in tmp_path.glob("*/*/solution/solve.sh")}
    assert len({ast.dump(ast.parse(p.read_text())) for p in broken}) == 3 and len(whole) > 1
    chosen = random.Random(4).choice(train)
    solution = (chosen.folder / "solution/solve.sh").read_text()
    assert play(4, "true", tasks=str(tmp_path))[1][-1].reward == 0
    _, steps = play(4, "python3 test_*.py", solution, "python3 test_*.py", tasks=str(tmp_path))
    assert "exit code 1" in steps[0].observation and "not" in steps[0].observation
    assert steps[2].observation == "[no output]" and steps[-1].success


@pytest.mark.slow
def test_a_module_that_ends_its_judge_or_forges_a_verdict_gets_nothing(tmp_path):
    chosen = random.Random(4).choice(repairs(tmp_path, "2")[0])
    name = chosen.name.partition("-")[0]
    forge = "import os\nverdict = '/logs/verifier/reward.txt'\n"
    written = forge + "open(verdict, 'w').write('1')\n"
    for cheat in (
        "import os; os._exit(0)\n",
        written + "os._exit(0)\n",
        written + "os.kill(os.getppid(), 9)\n",
        forge + "os.symlink('/proc/sys/net/ipv4/ip_default_ttl', verdict)\n",
        written
        + "if os.fork(): os._exit(0)\nos.closerange(0, 9)\nwhile True: open(verdict, 'w').write('1')\n",
        "import json\nknown = json.load(open('/tests/cases.json'))\n"
        f"def {name}(case): return next(b for a, b in known if a == case)\n",
        "import os\nfound = open(f'/proc/{os.getppid()}/mem', 'rb')\nos._exit(0)\n",
    ):
        write = f"cat > {name}.py <<'END'\n{cheat}END\n"
        step = play(4, write, tasks=str(tmp_path))[1][-1]
        assert step.done and step.reward == 0, cheat


# with its own name by the end: a shell's child has the shell's until it has begun its program
SLEEPS = "sleep 1000 & until grep -qx sleep /proc/$!/comm; do :; done"


def undo(**given):
    return Action("", ToolCall("undo", given))


def acted(*calls, **args):
    """The observations of a session with undo; each call is a command, or the arguments of undo."""

    async def go():
        env = Terminal(rungs=["print"], undo=True, **args)
        try:
            start = await env.reset(6)
            acts = [bash(call) if isinstance(call, str) else undo(**call) for call in calls]
            steps = [await env.step(action) for action in acts]
            return start, steps, list(Path(env._states._folder).iterdir())
        finally:
            await env.close()

    return asyncio.run(go())


@pytest.mark.slow
@pytest.mark.parametrize("with_criu", [True, False])
def test_an_agent_can_take_commands_back_and_is_told_what_came(with_criu, request):
    if not with_criu:
        request.getfixturevalue("no_criu")
    start, steps, kept = acted(
        "A=1; echo one > /app/f; cd /tmp",
        SLEEPS,
        "A=2; rm /app/f; kill %1",
        {},
        "echo $A $PWD; cat /app/f; jobs -r | wc -l",
        {"commands": 2},
        "jobs -r | wc -l; echo $A",
        {"commands": 9},
        {"commands": 0},
    )
    assert [tool["function"]["name"] for tool in start.tools] == ["bash", "undo"]
    undone = steps[3].observation
    assert undone.startswith("Undone, to before 'A=2; rm /app/f; kill %1': ")
    lost = "not jobs, open files and processes: sleep"
    assert ("processes are what they were" if with_criu else lost) in undone
    assert steps[4].observation == f"1 /tmp\none\n{int(with_criu)}"
    assert f"to before '{SLEEPS}'" in steps[5].observation
    assert steps[6].observation == "0\n1", "of two commands, the undone ones not among them"
    assert steps[7].observation == "Nothing is undone: 2 commands can be." and steps[7].invalid
    assert "1 or more" in steps[8].observation and steps[8].invalid
    assert len(kept) == 2, "what can't be gone back to is gone"


@pytest.mark.slow
def test_old_states_go_and_nothing_stays_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here, *_ = mark().split(".")
    dead = tmp_path / f"{_undo.PREFIX}{here}.{2**22 + 1}.1-gone"  # beyond the kernel's numbers
    dead.mkdir()
    _, _, kept = acted(*(f"echo {i} > /app/f" for i in range(_undo.MOST + 3)))
    assert len(kept) == _undo.MOST
    assert list(tmp_path.glob("rose-undo-*")) == []


@pytest.mark.slow
async def test_all_states_together_are_bounded_and_the_agent_is_told(monkeypatch):
    def with_room_for(states):
        taken = sum(state.bytes for state in _undo._held)
        free = states * taken / len(_undo._held) / _undo.SHARE - taken
        usage = shutil._ntuple_diskusage(0, 0, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda where: usage)

    envs = [Terminal(rungs=["print"], undo=True) for _ in range(2)]
    try:
        for env in envs:
            await env.reset(6)
            await env.step(bash("echo one > /app/f"))
            await env.step(bash("echo two > /app/f"))
        assert [state.folder is None for state in _undo._held] == [False] * 4
        with_room_for(3.5)
        await envs[1].step(bash("echo three > /app/f"))
        assert len(_undo._held) == 3
        refused = await envs[0].step(undo(commands=2))
        assert refused.invalid and "'echo one > /app/f'" in refused.observation
        assert "was not kept: all that is kept for undo takes" in refused.observation
        assert not (await envs[1].step(undo(commands=3))).invalid
        assert (await envs[1].step(bash("ls /app/f"))).observation.startswith("ls: ")
    finally:
        for env in envs:
            await env.close()
    assert _undo._held == []


@contextlib.asynccontextmanager
async def checkpointed(folder, **args):
    """Two environments; the first has one checkpoint, and then the engine is stopped, so that who
    resumes has to repeat calls."""
    engine = await HostStore(folder / "store", folder / "local").open()
    engine.policy = "classified"
    envs = [Terminal(rungs=["print"], **args) for _ in range(2)]
    try:
        for each in envs:
            each.keep_checkpoints(engine, "t")
        await envs[0].reset(6)
        await envs[0].step(bash("echo one > /app/f"))
        await envs[0].checkpoint()
        assert await envs[0].settled()
        engine.stop("by this test")
        yield envs
    finally:
        for each in envs:
            await each.close()
        await engine.close()


@pytest.mark.slow
async def test_undo_after_a_resume_is_repeated_or_refused(tmp_path):
    async with checkpointed(tmp_path, undo=True) as (env, other):
        await env.step(bash("echo two > /app/f"))
        assert (await env.step(undo(commands=9))).invalid
        assert not (await env.step(undo())).invalid
        once = await env.checkpoint()
        assert not (await env.step(undo())).invalid
        twice = await env.checkpoint()
        await other.resume(once)
        assert (await other.step(bash("cat /app/f"))).observation == "one"
        refused = await other.step(undo(commands=2))
        words = "Nothing is undone: 1 commands can be, those since the machine was moved."
        assert refused.invalid and refused.observation == words
        with pytest.raises(SandboxError, match="a call can't be repeated: .*Nothing"):
            await other.resume(twice)


@pytest.mark.slow
async def test_a_repeated_call_that_shows_something_else_ends_the_resume(tmp_path):
    async with checkpointed(tmp_path) as (env, other):
        await env.step(bash("cat /app/f"))
        same = await env.checkpoint()
        await env.step(bash("cat /proc/sys/kernel/random/uuid"))
        once = await env.checkpoint()
        await other.resume(same)
        assert await other.settled(), "what it was restored from"
        assert (await other.step(bash("cat /app/f"))).observation == "one"
        with pytest.raises(SandboxError, match="a call can't be repeated: .*uuid.* showed"):
            await other.resume(once)


@pytest.mark.slow
async def test_no_other_host_sweeps_states_of_a_trajectory(make_config, chats, tmp_path):
    chosen = "+experiment=terminal sandbox.checkpoints=classified"
    config = make_config(chosen, f"output_dir={tmp_path}")
    start = p.StartTrajectory("g0.0", "g0", p.Phase.TRAIN, "terminal", 6, None)
    engine = await open_store(config, tmp_path / "snapshots", NullRecorder())
    snapshots = Snapshots(tmp_path / "snapshots", 1, config, print)
    host = Hosted(config, chats["tiny"], snapshots, checkpoints=engine)
    host.handle(start)
    assert isinstance(await host.next(), p.TurnRequest)
    assert (tmp_path / "snapshots" / "g0.0").is_dir()
    host.handle(p.CancelTrajectory("g0.0"))
    while (tmp_path / "snapshots" / "g0.0").exists():
        await asyncio.sleep(0.01)
    await host.host.close()
