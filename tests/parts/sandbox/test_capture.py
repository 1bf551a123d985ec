"""Captures of running sandboxes, with CRIU as this user and as one without rights."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rose.parts.sandbox import SandboxError, capture, criu, layer, replay, trace
from rose.parts.sandbox.backend import ACCOUNT, SESSION
from tests.processes import ran, until

sys.path.insert(0, str(Path(__file__).parent))
import captures
from test_sandbox import DEADLINE_S, REPOSITORY

GET = REPOSITORY / "scripts/get_criu.sh"


@pytest.mark.slow
def test_what_is_captured_comes_back(readable, play):
    """Where CRIU or runsc can't be had this fails: install_test_packages.sh says why."""
    runsc = shutil.which("runsc") or criu.prefix().parent / "runsc/runsc"
    for name in ("bin", "home"):
        (readable / name).mkdir()
    shutil.copy(runsc, readable / "bin")
    # another user can't read this one's
    shutil.copytree(Path(criu.find().program).parents[3], readable / "criu", symlinks=True)
    variables = dict.fromkeys(("HOME", "TMPDIR"), str(readable / "home"))
    variables |= {"PATH": f"{readable}/bin:{os.environ['PATH']}", "ROSE_CRIU": f"{readable}/criu"}
    assert play("captures.py", **variables).count("passed") == len(captures.SCENARIOS)


@pytest.mark.slow
def test_criu_that_is_there_is_kept_and_one_that_is_nowhere_is_named(tmp_path):
    prefix = Path(criu.find().program).parents[3]
    done = ran([GET, prefix], timeout=DEADLINE_S)
    assert done.returncode == 0 and re.match(r".*/criu: Version: 4\.\d", done.stdout)
    env = os.environ | {"ROSE_CRIU_SUITES": "no-such-suite"}
    done = ran([GET, tmp_path / "criu"], env=env, timeout=DEADLINE_S)
    assert done.returncode == 1 and not (tmp_path / "criu").exists()
    assert "(suites no-such-suite; ROSE_CRIU_SUITES names others)" in done.stderr


def test_a_missing_criu_is_named_with_what_helps(tmp_path, criu_at):
    criu_at(tmp_path / "criu")
    with pytest.raises(SandboxError, match=r"criu is not there; scripts/get_criu\.sh gets it"):
        criu.find()
    (tmp_path / "criu").write_text("#!/bin/sh\n")
    (tmp_path / "criu").chmod(0o755)
    for path, words in ((tmp_path / "criu", "no program of 64 bits"), ("/bin/true", "no version")):
        criu_at(path)
        with pytest.raises(SandboxError, match=words):
            criu.find()


def test_messages_to_criu():
    fields = [(1, 300), (2, b"\x00\xff"), (68, b""), (200, 0)]
    assert criu.decode(criu.encode(fields)) == dict(fields)
    assert criu.encode([(1, 150)]) == b"\x08\x96\x01"  # the example of protobuf's own manual
    assert criu.decode(criu.encode([(1, -1)])) == {1: (1 << 64) - 1}
    for torn, words in ((b"\x08\x96", "ends too early"), (b"\x0d....", "wire type 5")):
        with pytest.raises(ValueError, match=words):
            criu.decode(torn)


def test_a_process_is_held_and_goes_on_without_its_parent_seeing_it(tmp_path):
    """In a process of its own, so that nobody else's are held."""
    script = f"""
import os, subprocess, time
from rose.parts.sandbox import trace
child = subprocess.Popen(["bash", "-c", "while :; do echo x >> count; done"], cwd={str(tmp_path)!r})
count = lambda: os.path.getsize({str(tmp_path / "count")!r})
def until(happened):
    end = time.monotonic() + {DEADLINE_S}
    while not happened():
        assert time.monotonic() < end
until(lambda: os.path.exists({str(tmp_path / "count")!r}))
trace.tasks = lambda spare: {{child.pid}} - spare
with trace.Stopped(set()) as stopped:
    assert set(stopped.held) == {{child.pid}}
    assert open(f"/proc/{{child.pid}}/stat").read().rpartition(")")[2].split()[0] == "t"
    before = count()
    assert child.poll() is None
    assert count() == before
until(lambda: count() > before)
child.kill()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=DEADLINE_S, cwd=REPOSITORY)


def record(folder: Path, into: Path, since=None, mapped=()):
    into.mkdir()
    back, data = os.getcwd(), os.open(into, os.O_RDONLY)
    known = {entry["path"]: entry for entry in since or ()}
    made = layer.Recorder(data, known, frozenset(mapped))
    root = os.open(folder, os.O_RDONLY)
    try:
        made.record(root, ".")
    finally:
        os.chdir(back)
        os.close(root)
        os.close(data)
    return made


def fill(entries, data: Path, root: Path):
    text = data.parent / "listing.json"
    text.write_text(json.dumps(entries))
    root.mkdir()
    contents = os.open(data, os.O_RDONLY)
    try:
        layer.Filler(os.open(text, os.O_RDONLY), contents).fill(str(root), ".")
    finally:
        os.close(contents)


def settle(*paths: Path):
    """Until the files' times are old enough to tell a change by."""
    now = time.time_ns
    old = lambda: all(now() - p.lstat().st_ctime_ns > 2 * layer.TICK_NS for p in paths)  # noqa: E731
    until(old, "old times", DEADLINE_S)


def test_unchanged_contents_are_not_copied(tmp_path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    for name in "abc":
        (root / name).write_text(name)
    settle(*(root / name for name in "abc"))
    one = record(root, tmp_path / "1")
    (root / "b").write_text("B")
    two = record(root, tmp_path / "2", one.entries)
    expected = {"a": None, "b": "data/0", "c": None}
    assert {e["path"]: e["data"] for e in two.entries if e["kind"] == "file"} == expected
    # a file that was just written may change within the same tick: it is never taken as unchanged
    with monkeypatch.context() as slow:
        slow.setattr(layer, "TICK_NS", 3600 * 10**9)  # however slow this machine is
        three = record(root, tmp_path / "3", record(root, tmp_path / "4", one.entries).entries)
    assert next(e for e in three.entries if e["path"] == "b")["data"] is not None
    mapped = record(root, tmp_path / "5", one.entries, [(root / "a").stat().st_ino])
    assert next(e for e in mapped.entries if e["path"] == "a")["data"] is not None


GOOD = {"mode": 0o755, "uid": os.geteuid(), "gid": os.getegid(), "mtime_ns": 0, "xattrs": {}}
TOP = GOOD | {"path": ".", "kind": "dir"}


LINK = GOOD | {"path": "l", "kind": "link", "target": "../elsewhere"}
FILE = GOOD | {"path": "x", "kind": "file"}


@pytest.mark.parametrize(
    "entry, words",
    [
        ({"path": "../out", "kind": "dir"}, "not below a folder"),
        ({"path": "/out", "kind": "dir"}, "not below a folder"),
        ({"path": "a/b", "kind": "dir"}, "not below a folder"),
        ({"path": "l/x", "kind": "dir"}, "not below a folder of the listing"),
        ({"path": "l", "kind": "dir"}, "twice in it"),
        ({"path": "..", "kind": "dir"}, "is no 'dir'"),
        ({"path": "x", "kind": "device"}, "is no 'device'"),
        (FILE | {"data": None}, "not in this capture"),
        (FILE | {"data": "data/../../x"}, "not in this capture"),
        (FILE | {"same": "y"}, "which is no file before it"),
        ({"path": "x"}, "an entry without all of"),
    ],
)
def test_a_listing_that_leads_elsewhere_is_refused(tmp_path, entry, words):
    """Nothing is written through its link `l`, either."""
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises((ValueError, OSError), match=words):
        fill([TOP, LINK, GOOD | entry], tmp_path / "data", tmp_path / "root")
    written = {*os.listdir(tmp_path / "root"), *os.listdir(tmp_path / "elsewhere")}
    assert written <= {"l"}


def session(*commands: str) -> tuple[str, bytes]:
    """What the commands print, and the account that is asked for after them."""
    said = "".join(f"{each}\0" for each in (*commands, ACCOUNT)).encode()
    bash = ["bash", "--norc", "--noprofile", "-c", SESSION]
    done = subprocess.run(bash, input=said, capture_output=True)
    return done.stdout.decode(), done.stderr.split(b"\0")[-2]


def replayed(begin: str, show: str) -> tuple[list[str], str]:
    """What a script of the state after `begin` says that it lost, and what `show` prints then."""
    printed = session(replay.script(session(begin)[1]), show)[0]
    said, end, shown = printed.rpartition("\1end\n")
    return replay.lost((said + end).encode()), shown


def test_a_shells_state_as_a_script():
    begin = (
        "cd /tmp; umask 077; set -- 'a b' c; f() { echo \"f$1\"; }; export -f f; A=$'x\\n\"y'; "
        "declare -r fixed=1; declare -i number=3; list=(1 'two words'); alias g='echo g'; "
        "set -u; trap 'echo held' USR1; shopt -s nullglob"
    )
    show = (
        'echo "$PWD $(umask) $# $1 $(f 2) $A $fixed ${list[1]} $number"; alias g; shopt nullglob; '
        "trap -p USR1; echo $-; bash -c 'f 3'"
    )

    script = replay.script(session(begin)[1])
    assert replayed(begin, show) == ([], session(begin, show)[0])
    assert "BASHOPTS" not in script and "SECONDS" not in script


def test_a_function_with_patterns_of_extglob_comes_back():
    begin = "shopt -s extglob; eval 'f() { case $1 in @(a|b)) echo yes;; esac; }'; A=1; cd /tmp"
    for shopt in ("", "; shopt -u extglob"):
        show = "f a; f c; echo $A $PWD; shopt extglob"
        assert replayed(begin + shopt, show) == ([], session(begin + shopt, show)[0])


def test_an_alias_does_not_change_how_the_rest_is_read():
    begin = "shopt -s expand_aliases; alias set='exit 3' shopt='exit 4' trap=no; trap ': x' USR1"
    expected = ([], "trap -- ': x' SIGUSR1\nalias trap='no'\n")
    assert replayed(begin, "\\trap -p USR1; alias trap") == expected


def test_what_a_shell_can_not_take_again_is_named_and_the_rest_comes_back(tmp_path):
    gone = tmp_path / "gone"
    begin = f"mkdir {gone}; cd {gone}; rmdir {gone}; A=1; f() {{ echo $'\\1'; }}; set -u"
    failed, shown = replayed(begin, "echo $A $-; f")
    assert failed == ["working directory"] and "1 hu" in shown and "\1" in shown
    torn = replay.NOTHING.replace(b"\1functions\n", b"\1functions\nf() { ) }\n")
    torn = torn.replace(b"\1variables\n", b'\1variables\ndeclare -- A="1"\n')
    printed = session(replay.script(torn), "echo $A")[0]
    assert printed.endswith("1\n")
    assert replay.lost(printed.encode()) == ["functions"]
    assert replay.lost(b"\1functions\n") == ["functions", "what comes after that"]


def test_what_is_no_state_of_a_shell_is_named():
    with pytest.raises(ValueError, match="did not print its whole state: 'bash: x'"):
        replay.script(b"bash: x")


@pytest.mark.parametrize(
    "about, words",
    [
        (None, "No such file"),
        ("{", "JSONDecodeError"),
        ("[" * 99_999, "RecursionError"),
        ('{"format": 99}', "format 99; this ROSE reads 1"),
        ('{"format": 1, "spec": {}}', "KeyError"),
        ("[]", "TypeError"),
    ],
)
def test_a_folder_that_is_no_capture_is_named(tmp_path, about, words):
    if about is not None:
        (tmp_path / "about.json").write_text(about)
    with pytest.raises(SandboxError, match=f"{tmp_path}: not a whole capture: .*{words}"):
        capture.read(tmp_path, None)


def test_errno_of_a_trace_is_the_kernels():
    with pytest.raises(OSError) as caught:
        trace.ptrace(trace.SEIZE, 0)
    assert caught.value.errno == errno.ESRCH
