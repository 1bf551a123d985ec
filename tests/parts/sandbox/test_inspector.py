"""What the inspector says of a turn, with the kernel's real features, as root and without rights."""

import json
import sys
from pathlib import Path

import pytest

from rose.parts.sandbox import Sandbox, Spec
from rose.parts.sandbox.inspector import FILES, NONE, PROCESS, Inspector
from rose.parts.sandbox.piped import Piped

sys.path.insert(0, str(Path(__file__).parent))
import scenarios
from test_sandbox import Plain, ran_below

LONG_S = 60.0
pytestmark = pytest.mark.usefixtures("loop")
NO_INOTIFY = """
import asyncio
from rose.parts.sandbox import Sandbox, Spec
from rose.parts.sandbox.inspector import Inspector

async def go():
    async with await Sandbox.start(Spec(), "namespaces") as box:
        inspector = Inspector(box)
        await inspector.look()
        for command in ("true", "echo x > f; A=1"):
            await box.run(command, 60)
            change = await inspector.look()
            print(change.kind, change.unsure, change.why)

asyncio.run(go())
"""


@pytest.fixture
def watched(loop, box):
    """(a sandbox, its inspector, which has looked once)."""
    inspector = Inspector(box)
    assert loop.run(inspector.look()).why == "the first look"
    return box, inspector


async def test_what_the_host_writes_is_seen_and_a_change_is_named(watched):
    box, inspector = watched
    await box.write_file("/app/deep/er", b"")
    assert (await inspector.look()).kind != NONE
    await box.run("echo x > f", LONG_S)
    assert (await inspector.look()).why == "/app/f changed"


async def test_a_look_leaves_no_trace(watched):
    """Random numbers, the jobs' table, and what the background prints between two turns."""
    box, inspector = watched
    ended = 'until test -z "$(jobs -r)"; do :; done'
    await box.run(f"RANDOM=42; true & {ended}; mkfifo pipe", LONG_S)
    await box.run("(read -r word < pipe; echo $word; echo > pipe) & RANDOM=42", LONG_S)
    await inspector.look()
    await inspector.look()
    with_looks = await box.run("echo $RANDOM; jobs %1; echo late > pipe; cat pipe", LONG_S)
    assert "Done" in with_looks.output and "late\n" in with_looks.output, with_looks
    await box.run("RANDOM=42", LONG_S)
    without = await box.run("echo $RANDOM", LONG_S)
    assert with_looks.output.split()[0] == without.output.strip()


async def test_a_shell_that_does_not_tell_its_state_is_ended(watched):
    box, inspector = watched
    await box.run("trap 'while [[ $__rose == $'\\''\\1'\\'' ]]; do :; done' DEBUG", LONG_S)
    assert await box.account(0.2) is None
    change = await inspector.look()
    assert change.kind == PROCESS and change.why == "the shell itself changed"
    await scenarios.still_alive(box)


async def test_a_forged_exit_code_is_no_state(watched):
    box, inspector = watched
    await box.run("printf 'x\\0' > /run/rose/codes", LONG_S)
    assert (await inspector.look()).kind == NONE
    for mark in ("\1", "\2"):  # They are the session's own.
        assert (await box.run(mark, LONG_S)).note.startswith("not run")
    await scenarios.still_alive(box)


async def test_a_process_that_ran_to_be_saved_has_not_changed(watched):
    box, inspector = watched
    await box.run("coproc C { exec cat; }", LONG_S)
    asked = "echo x >&${C[1]}; read -r -u ${C[0]} A; until grep -qE '^(0|63) ' /proc/$C_PID/syscall; do :; done"
    await box.run(asked, LONG_S)
    await inspector.look()
    await box.run(asked, LONG_S)
    await inspector.resume()
    assert (await inspector.look()).kind == NONE
    await box.run(asked, LONG_S)
    assert (await inspector.look()).why == "process cat ran"


async def test_a_write_into_a_process_that_sleeps_is_seen(watched):
    box, inspector = watched
    asleep = "until grep -qE '^(230|115) ' /proc/$!/syscall; do :; done"
    await box.run(f"sleep 1000 & {asleep}", LONG_S)
    await inspector.look()
    await box.run("echo 0x33 > /proc/$!/coredump_filter", LONG_S)
    change = await inspector.look()
    assert change.why == "coredump_filter of process sleep was written", change
    assert (await inspector.look()).kind == NONE


async def test_more_unsure_files_than_an_answer_takes_are_all(watched):
    """Names of bytes that aren't UTF-8 take six times their length."""
    box, inspector = watched
    program = "for i in range(400):\n    open(b'%03d' % i + b'\\xff' * 250, 'w').write('x')\n"
    await box.write_file("/tmp/names.py", program.encode())
    await box.run("python3 /tmp/names.py", LONG_S)
    change = await inspector.look()
    assert (change.kind, change.unsure) == (FILES, None) and change.why.endswith(" changed")
    await scenarios.still_alive(box)


@pytest.mark.slow
async def test_programs_with_any_name_are_looked_at_saved_and_stopped(watched, tmp_path):
    """Bytes that aren't UTF-8, and what Python, but no kernel, takes for the end of a line."""
    names = r"$'\xff)' $'\x1cctxt_switches'"
    named = f"for n in {names}; do cp /usr/bin/sleep /tmp/$n; /tmp/$n 1000 & done"
    begun = "until [ $(pgrep -cf ' 1000$') = 2 ]; do :; done"

    box, inspector = watched
    await box.run(f"{named}; {begun}", LONG_S)
    assert (await inspector.look()).kind == PROCESS
    await box.capture("files", tmp_path / "c")
    saved = json.loads((tmp_path / "c/about.json").read_text())
    assert "\ufffd)" in saved["running"]
    # by then it has begun
    assert (await box.run("sleep 1000", 3.0)).note == "stopped: not done after 3 s"
    await scenarios.still_alive(box)


async def test_what_is_not_seen_counts_as_changed():
    shell = await Piped(Plain, Spec()).begin()
    async with Sandbox(shell, Spec(), "plain") as box:
        inspector = Inspector(box)
        for _ in range(2):
            change = await inspector.look()
            assert (change.kind, change.unsure) == (PROCESS, None)
            assert "changes in plain are not visible" in change.why


def test_without_inotify_no_turn_is_without_effect():
    script = "echo 0 > /proc/sys/user/max_inotify_instances; exec unshare -U --map-user=1"
    done = ran_below(f'{script} --map-group=1 "$@"', NO_INOTIFY)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("files None a change may not be seen: no inotify"), done.stderr
    assert "raise fs.inotify.max_user_instances" in first
    assert second == "process None the shell's variables changed"


@pytest.mark.slow
def test_commands_with_known_effects(play):
    """No miss, and at most one false alarm in twenty."""
    said = play("effects.py")
    counts = json.loads(said.splitlines()[-2])
    assert counts["missed"] == 0, said
    assert 60 <= counts["commands"] >= 20 * counts["alarms"], said
