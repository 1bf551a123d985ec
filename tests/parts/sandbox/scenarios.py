"""What sandboxes must withstand, with the kernel's real features, as whichever user runs this.

    python tests/parts/sandbox/scenarios.py fast|slow [NAME ...]

Each scenario gets a running sandbox and asserts. Standard library only: another user may have no
other Python than the system's.
"""

import asyncio
import contextlib
import inspect
import os
import sys
import tempfile

from boxes import LONG_S, SMALL, of_image, play, refused, start

from rose.parts.sandbox import Limits, Sandbox, SandboxError, Spec
from rose.parts.sandbox.inspector import Inspector

VERDICT = "/logs/verifier/reward.txt"


async def said(box, command):
    return (await box.run(command, LONG_S)).output


async def still_alive(box):
    result = await box.run("echo alive; echo $((6 * 7))", LONG_S)
    assert result.output == "alive\n42\n" and result.code == 0, result


async def the_session_keeps_its_state(box):
    await box.run("export A=1; f() { echo f$A; }; cd /tmp; umask 027", LONG_S)
    result = await box.run("f; pwd; umask; exit_code() { return 7; }; exit_code", LONG_S)
    assert result.output == "f1\n/tmp\n0027\n" and result.code == 7
    assert await said(box, "cat; echo 'a\nb' \"c\"; # words") == "a\nb c\n"
    assert (await box.run("if", LONG_S)).code != 0  # no shell's end


async def an_ended_shell_is_replaced(box):
    for ending in ("exit 3", "kill -9 $$", "exec true", "set -e; false"):
        result = await box.run(f"cd /app; echo kept > file; {ending}", LONG_S)
        assert result.restarted and "the shell ended" in result.words(), (ending, result)
        assert await said(box, "cat /app/file") == "kept\n"


async def what_disables_the_shells_own_commands_hangs_nothing(box):
    """Each is answered at once, and the next command runs, in this session or a new one."""
    for command in (
        "enable -n printf",
        "enable -n echo",
        "enable -n printf echo",
        "enable -n read eval",
        "enable -n builtin",
        "eval() { :; }; printf() { :; }; read() { :; }",
        "continue",
        "continue 9",
        "break",
        "unset __rose",
        "readonly __rose",
        "ulimit -n 3",
        "set -r",
        "exec bash",
        "set -n",
        "builtin() { :; }",
        "builtin() { echo x; }",
        "unset() { :; }; eval() { :; }; builtin() { return 1; }",
        "__rose=$'\\1'; continue",
        "trap 'echo $BASH_COMMAND' DEBUG",
    ):
        ran = await box.run(command, LONG_S)
        assert "not done" not in ran.note, (command, ran)
        result = await box.run("(exit 7)", LONG_S)
        assert result.code == 7 and not result.note, (command, result)
        assert b"\1end" in await box.account(LONG_S), command
    await box.run("trap - DEBUG", LONG_S)


async def the_session_leaves_no_mark_on_commands(box):
    """Commands have the descriptors that scripts use, and a trace of nothing else."""
    await box.run("echo kept > /tmp/in; exec 3</tmp/in 4>/tmp/out 5>&4", LONG_S)
    assert await said(box, "read -r line <&3; echo $line >&5; cat /tmp/out") == "kept\n"
    await box.run("set -x", LONG_S)
    assert await said(box, "echo a") == "++ echo a\na\n"
    await box.run("set +x", LONG_S)


async def late(run):
    """(deadline in seconds, what `run(deadline)` gave) of the first one by which it had begun to
    print: a busy machine may be slow to begin anything."""
    for wait_s in (0.1, 1.0, 10.0, LONG_S):
        result = await run(wait_s)
        if result.output:
            break
    return wait_s, result


async def a_late_command_is_stopped_and_the_session_goes_on(box):
    await box.run("A=kept", LONG_S)
    wait_s, result = await late(lambda s: box.run("echo begun; sleep 1000; echo $A", s))
    assert result.output.startswith("begun\n") and result.code is None
    assert not result.restarted and result.note == f"stopped: not done after {wait_s:g} s"
    assert await said(box, "echo $A") == "kept\n"


async def output_is_cut(box):
    result = await box.run("head -c 100000 /dev/zero | tr '\\0' x", LONG_S, limit=10)
    assert result.output == "x" * 10 and result.code == 0
    assert result.note == "output cut: the first 10 of 100000 bytes are shown"


async def the_disk_has_a_bound(box):
    result = await box.run("head -c 100M /dev/zero > /app/big", LONG_S)
    assert result.code and "No space left on device" in result.output
    await refused(box.write_file("/app/other", bytes(1 << 20)), "No space", OSError)
    await box.run("rm -f /app/big /app/other", LONG_S)


async def the_host_is_not_seen(box):
    secret = tempfile.NamedTemporaryFile(prefix="secret")  # noqa: SIM115 (lives as long as this)
    secret.write(b"x")
    seen = await box.run(f"cat {secret.name} /etc/shadow /root/.bashrc /proc/1/environ", LONG_S)
    assert seen.code and seen.output.count("No such file") == 3 and "denied" in seen.output
    assert int(await said(box, "ls -d /proc/[0-9]* | wc -l")) < 8
    for path in ("/proc/1/mem", "/proc/sys/kernel/core_pattern", "/usr/bin/env", "/etc/passwd"):
        assert (await box.run(f"echo x > {path}", LONG_S)).code, path
    for what in ("mount -t tmpfs x /tmp", "unshare -U true", "unshare -n true", "umount /dev"):
        assert (await box.run(what, LONG_S)).code, what
    assert (await box.run("mknod /tmp/disk b 254 0", LONG_S)).code
    # What changes a process that sleeps, by the numbers of x86-64 and arm64.
    calls = f"({311 if os.uname().machine == 'x86_64' else 271}, 438)"
    call = "print([ctypes.CDLL(None, use_errno=True).syscall(n, -1, 0, 0, 0, 0, 0), ctypes.get_errno()])"
    program = f"python3 -c 'import ctypes\nfor n in {calls}: {call}'"
    assert await said(box, program) == "[-1, 1]\n" * 2


async def there_is_no_network_but_loopback(box):
    open_it = "import socket; socket.create_connection(({!r}, {}), 2)"
    with_server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = with_server.sockets[0].getsockname()[1]
    for host, at in (("127.0.0.1", port), ("1.1.1.1", 53)):
        result = await box.run(f'python3 -c "{open_it.format(host, at)}"', LONG_S)
        assert result.code == 1 and ("refused" in result.output or "unreach" in result.output)
    with_server.close()
    families = "import socket\nfor n in range(50):\n    try: print(n, socket.socketpair(n) and '')"
    families += "\n    except OSError: pass\n    for kind in (1, 2, 3, 5):"
    families += "\n        try: socket.socket(n, kind); print(n)\n        except OSError: pass"
    made = await said(box, f'python3 -c "{families}"')
    assert set(made.split()) == {"1", "2", "10", "16"}, made
    listening = "import socket; s = socket.create_server(('127.0.0.1', 80)); print(s.getsockname())"
    assert "80" in await said(box, f'python3 -c "{listening}"')


async def files_are_read_and_written(box):
    await box.write_file("/app/deep/er/file", b"\x00\xff")
    assert await box.read_file("/app/deep/er/file") == b"\x00\xff"
    await box.run("mkfifo /app/pipe; ln -s /etc/shadow /app/link", LONG_S)
    for path in ("/app/pipe", "/app/link", "/app/none", "/proc/1/mem", "/dev/zero", "/app", "a\0"):
        await refused(box.read_file(path), "", OSError)
    assert await box.read_file("/etc/hostname") == b"sandbox\n"


async def two_sandboxes_share_nothing(box):
    async with await start() as other:
        begun = "(sleep 1000 &); until pgrep -fx 'sleep 1000'; do :; done"
        ran = await box.run(f"echo mine > /tmp/mine; {begun}", LONG_S)
        assert ran.code == 0 and not ran.note, ran
        assert "mine" not in await said(other, "ls /tmp /app /root")
        killed = await other.run("kill -9 -1; kill -9 $$", LONG_S)
        assert killed.restarted and "the shell ended" in killed.note, killed
        assert await said(box, "pgrep -cfx 'sleep 1000'") == "1\n"


HOARD = """
import ctypes, os, resource, socket, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
kept, libc = [], ctypes.CDLL(None)
if sys.argv[1] == "watch":
    while (fd := libc.inotify_init()) >= 0:
        kept.append(fd)
else:
    try:
        while True:
            kept.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
            kept[-1][0].setblocking(False)
            try:
                while True:
                    socket.send_fds(kept[-1][0], [b"x"], [0] * 250)
            except BlockingIOError:
                pass
    except OSError:
        pass
open("/tmp/full", "w").close()
time.sleep(1000)
"""


async def what_one_hoards_the_others_have(box):
    """Descriptors in flight and notifications, which the kernel counts per user."""
    await box.write_file("/tmp/hoard.py", HOARD.encode())
    async with await start() as other:
        for what in ("send", "watch"):
            begun = f"python3 /tmp/hoard.py {what} & until test -e /tmp/full; do sleep .01; done"
            assert (await box.run(begun, LONG_S)).code == 0
            for each in (box, other):
                await each.write_file("/app/file", b"1")
                assert await each.read_file("/app/file") == b"1"
            async with await start() as third:
                look = Inspector(third)
                await look.look()
                await third.run(":", LONG_S)
                change = await look.look()
                assert change.kind == "none", change
            await box.run("kill %1; rm /tmp/full", LONG_S)


async def a_check_is_beyond_reach(box):
    """The agent's background process can neither see nor end it, nor plant what it reads."""
    hunt = "while :; do pkill -9 -f check.sh; echo 1 > /logs/verifier/reward.txt; sleep .01; done"
    plant = "mkdir -p /logs/verifier /tests; echo planted > /tests/check.sh"
    await box.run(f"{plant}; {hunt} 2>/dev/null &", LONG_S)
    server = "python3 -m http.server -b 127.0.0.1 8000 >/dev/null 2>&1 &"
    await box.run(f"{server} cd /app; echo done > state", LONG_S)
    program = "sleep 0.2; cat state; seen=(/proc/[0-9]*); echo ${#seen[@]}; pwd; ls /logs/verifier; echo 0 > /logs/verifier/reward.txt; sleep 0.1"
    done = await check(box, program)
    assert done.code == 0 and done.files == {VERDICT: b"0\n"}, done
    assert done.output.split() == ["done", "2", "/app"], done
    _, done = await late(lambda s: check(box, "echo begun; sleep 1000", wait_s=s))
    assert done.code is None and done.output == "begun\n" and not done.files


async def check(box, script, argv=("/bin/bash", "/tests/check.sh"), wait_s=LONG_S):
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/check.sh", "w") as file:
            file.write(script)
        return await box.check(list(argv), folder, collect=(VERDICT,), wait_s=wait_s)


async def what_a_check_stands_on_can_not_be_replaced(box):
    paths = [p for p in ("/bin", "/sbin", "/lib", "/lib64") if os.path.isdir(p)]
    for path in (*paths, "/usr", "/etc", "/tests", "/logs"):
        result = await box.run(f"rm -f {path}; rmdir {path}; mv {path} /gone", LONG_S)
        assert result.code and "busy" in result.output, (path, result)
    for planted in ("mkfifo /tests/x", "touch /logs/x", "ln -s /app /tests/x"):
        assert "Read-only" in await said(box, planted), planted
    await box.run("mkdir -p ~/.local; export PYTHONUSERBASE=/root/.local", LONG_S)
    site = "python3 -c 'import site; print(site.USER_SITE)'"
    await box.run(f"mkdir -p $({site}); echo 'print(666)' > $({site})/usercustomize.py", LONG_S)
    hunt = "while :; do rmdir /tests /logs; mv /tests /gone; rm -rf /logs; done"
    await box.run(f"({hunt}) >/dev/null 2>&1 &", LONG_S)
    done = await check(box, "for i in {1..20}; do ls /tests; done; python3 -c 'print(42)'; ls ~")
    assert done.code == 0 and done.output.split() == ["check.sh"] * 20 + ["42"], done


async def a_check_has_none_of_the_agents_settings_in_the_root(box):
    """The programs of tests read them in every folder above; what a task asks for is there."""
    names = "pytest.ini conftest.py package.json .coveragerc jest.config.js Directory.Build.props"
    settings = " ".join(f"/{name}" for name in names.split())
    plant = f"touch {settings}; mkdir -p /node_modules/x /asked; echo right > /answer"
    plant += "; ln -s answer /link; echo deep > /asked/deep"
    await box.run(f"{plant}; (while :; do touch {settings}; done) 2>/dev/null &", LONG_S)
    look = f"cat /answer /link /asked/deep; echo new > /asked/new; pwd; ls -d {settings}"
    look += " /node_modules /.* 2>/dev/null; ls /usr > /dev/null; echo $?; echo x > /dev/null"
    done = await check(box, look)
    assert done.output.split() == ["right", "right", "deep", "/app", "0"], done
    assert await said(box, "cat /asked/new") == "new\n", "the state is the agent's"
    await box.run("for i in {1..3000}; do echo > /a$i; done", LONG_S)
    assert (await check(box, "cat /asked/deep")).output == "deep\n"


async def a_check_runs_whatever_the_agent_makes_of_the_root(box):
    """An agent that could stop its check would have its work thrown away, and not get reward 0."""
    strange = r"mkdir /$'a\xff'; : > /$'b\xff'; ln -s nowhere /dangling; mkfifo /pipe"
    await box.run(f"{strange}; for i in {{1..1100}}; do mkdir /d$i; done", LONG_S)
    race = "while :; do f=$(mktemp /t.XXXX); rm $f; mkdir $f; rmdir $f; done"
    await box.run(f"({race}) >/dev/null 2>&1 &", LONG_S)
    for _ in range(5):
        done = await check(box, "ls /tests /usr/bin/env; pwd")
        assert done.code == 0 and done.output.split()[-1] == "/app", done


async def a_check_has_what_the_image_had(_):
    """Settings and packages of an image's own root are there for its tests, as they were."""
    with tempfile.TemporaryDirectory() as image:
        files = dict.fromkeys((".venv/marker", "node_modules/left", "pytest.ini"), "given\n")
        spec = of_image(image, files, limits=SMALL)
        async with await Sandbox.start(spec, "namespaces") as box:
            await box.run("echo mine | tee /pytest.ini /tox.ini /.coveragerc", LONG_S)
            look = "cat /.venv/marker /node_modules/left /pytest.ini; ls /tox.ini /.coveragerc"
            done = await check(box, f"{look} 2>/dev/null", ("/bin/sh", "/tests/check.sh"))
            assert done.output.split() == ["given"] * 3, done


async def a_check_outlives_what_fills_the_sandbox(box):
    fill = """
import os, time
full, write = os.pipe()
for user in range(9):  # of other users, if there are some, the kernel counts as many again
    if os.fork() == 0:
        try:
            os.setuid(user)
            while os.fork():
                pass
        except OSError:
            os.write(write, b"f")
        time.sleep(1000)
left = 9
while left:
    left -= len(os.read(full, left))
"""
    await box.write_file("/tmp/fill.py", fill.encode())
    await box.run("head -c 100M /dev/zero > /app/big; head -c 100M /dev/zero > /big", LONG_S)
    await box.run("python3 /tmp/fill.py 2>/dev/null", LONG_S)
    done = await check(box, "echo 1 > /logs/verifier/reward.txt")
    assert done.files[VERDICT] == b"1\n", done


async def a_check_that_floods_is_stopped(box):
    done = await check(box, "yes")
    assert done.code is None and done.output == "y\n" * 8192, done


async def strange_orders_leave_the_sandbox_as_it_is(box):
    for path in ("/app/" + "x" * 200_000, "/app/" + "x/" * 2045, "/app/\ud800"):
        for what in (box.read_file(path), box.write_file(path, b"")):
            await refused(what, "", OSError)
    await box.write_file("/app/fine", b"1")
    assert await box.read_file("/app/fine") == b"1"
    flood = "while :; do echo 11111111 >> /run/rose/codes; echo; done"
    assert (await box.run(f"{flood} & {flood}", 0.3, limit=10)).restarted
    await still_alive(box)
    bad = Spec(limits=SMALL)  # as an order that no check has seen
    object.__setattr__(bad, "limits", Limits(cpus=float("nan")))
    await refused(Sandbox.start(bad, "namespaces"), "NaN")


async def a_memory_hog_is_killed_and_process_1_is_not(box):
    assert await said(box, "cat /proc/self/oom_score_adj") == "500\n"
    hog = "import os\nf = os.memfd_create(str())\nfor _ in range(400): os.write(f, bytes(1 << 20))"
    result = await box.run(f"python3 -c '{hog}'", LONG_S)
    assert result.code in (0, 137), result  # 0: no control group counts memory here


async def a_fork_bomb_stays_inside(box):
    result = await box.run(":(){ :|:& };:; sleep 1000", 1.0)
    assert result.code is None and "stopped" in result.words()
    for _ in range(50):  # until the last one is gone
        if len((await said(box, "echo /proc/[0-9]*")).split()) < 8:
            break
        await box.run("kill -9 -1", LONG_S)


async def everything_may_be_removed(box):
    removed = await said(box, "rm -rf --no-preserve-root / 2>&1 | head -3; echo done")
    assert removed.endswith("done\n")
    await still_alive(box)
    assert os.path.exists("/usr/bin/env") and os.path.exists("/etc/passwd")


async def endless_output_is_stopped(box):
    result = await box.run("yes", LONG_S)
    assert "it printed more than 64 MiB" in result.words() and len(result.output) == 16384


async def a_loop_of_the_shell_itself_is_ended(box):
    await box.run("cd /app; echo x > y", LONG_S)
    result = await box.run("while :; do :; done", 0.2)
    assert result.restarted and "its shell had to be ended" in result.words()
    assert await said(box, "pwd; cat y") == "/app\nx\n"


async def memory_has_a_bound(box):
    told = await said(box, "python3 -c 'bytearray(400 << 20)'; echo $?")
    assert told.endswith("137\n") or "MemoryError" in told


async def an_image_can_be_changed_and_stays_as_it_is(box):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as image:
        spec = of_image(image, {"etc/motd": "hello\n"}, workdir="/work")
        async with await Sandbox.start(spec, "namespaces") as inside:
            result = await inside.run("cat /etc/motd; pwd; rm -r /etc; ls /etc", LONG_S)
            assert result.output.startswith("hello\n/work\n") and "No such file" in result.output
        assert os.path.exists(f"{image}/etc/motd")


async def sixty_four_run_at_once(box):
    boxes = await asyncio.gather(*(start() for _ in range(64)))
    asked = [each.run(f"echo {i} > /tmp/i; cat /tmp/i", LONG_S) for i, each in enumerate(boxes)]
    results = await asyncio.gather(*asked)
    assert [result.output for result in results] == [f"{i}\n" for i in range(64)]
    for each in boxes:
        await each.close()


def is_scenario(each):
    parameters = [*inspect.signature(each).parameters] if inspect.iscoroutinefunction(each) else []
    return parameters in (["box"], ["_"]) and each is not still_alive


SCENARIOS = [each for each in list(globals().values()) if is_scenario(each)]
SLOW = SCENARIOS[SCENARIOS.index(a_fork_bomb_stays_inside) :]
FAST = SCENARIOS[: -len(SLOW)]


@contextlib.asynccontextmanager
async def place():
    async with await start() as box:
        yield (box,)
        await still_alive(box)


if __name__ == "__main__":
    try:
        asyncio.run(play({"fast": FAST, "slow": SLOW}[sys.argv[1]], sys.argv[2:], place))
    except SandboxError as error:
        sys.exit(f"SandboxError: {error}")
