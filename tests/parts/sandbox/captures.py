"""What a capture of a running sandbox must bring back, with the kernel's real features and CRIU, as
whichever user runs this.

    python tests/parts/sandbox/captures.py [NAME ...]

Each scenario gets a sandbox and an empty folder, and asserts. Standard library only: another user
may have no other Python than the system's.
"""

import asyncio
import contextlib
import inspect
import os
import shutil
import sys
import tempfile
from pathlib import Path

from boxes import LONG_S, of_image, play, refused, start

from rose.parts.sandbox import Limits, Sandbox, SandboxError, Spec, capture

LARGER = Limits(memory_mib=512, disk_mib=32, processes=40)
STATUS = "grep -E '^(Uid|Gid|Cap|NoNewPrivs|Seccomp|Umask|SigIgn|SigCgt)' /proc/$$/status"
BUSY = r"""
export SHOWN='a b'; hidden=$'line\nother'; declare -A map=([k]=v); twice() { echo "$1$1"; }
alias say='echo said'; shopt -s expand_aliases; set -o pipefail; umask 027; trap 'echo bye' USR1
mkdir deep; cd deep; exec 7>>log 8<>/dev/shm/held; echo kept >&8
(i=0; while :; do echo $((i++)) >&7; sleep .01; done) &
python3 -c "
import http.server
http.server.test(http.server.SimpleHTTPRequestHandler, port=80, bind='127.0.0.1')" 2>/dev/null >&2 &
(setsid sleep 1000 &)
(sleep 1001 &)
echo served > file
"""
SERVED = "import urllib.request as u; print(u.urlopen('http://127.0.0.1/file').read())"
SERVED = f'python3 -c "{SERVED}"'
STATE = (
    """echo "$SHOWN" "$hidden" ${map[k]} $(twice x) $PWD $(umask); say; set -o | grep pipefail
trap -p; jobs -p; echo $! $$; ulimit -u; cat /proc/$$/oom_score_adj
sed 's/rose-.*//' /proc/$$/cgroup; readlink /proc/$$/fd/*
ps -eo pid,ppid,pgid,sess,args | grep -E '[s]leep 100|[h]ttp.server'
"""
    + STATUS
)


async def output(box, command):
    result = await box.run(command, LONG_S)
    assert result.code == 0 and not result.restarted, (command, result)
    return result.output


async def busy(box):
    await output(box, BUSY)
    begun = "[ -s log ] && pgrep -fx 'sleep 1000' && pgrep -fx 'sleep 1001'"
    await output(box, f"until {SERVED} 2>/dev/null; do sleep .02; done; until {begun}; do :; done")


@contextlib.asynccontextmanager
async def again(box, folder, kind="process"):
    """A sandbox restored from a capture of `box`, and that capture's listing."""
    captured = await box.capture(kind, folder)
    async with await Sandbox.restore(folder) as other:
        yield other, captured.listing


async def goes_on(box):
    """The loop that was running writes on, to the file that it had open."""
    await output(box, "n=$(wc -l <log); until [ $(wc -l <log) -gt $((n + 3)) ]; do sleep .01; done")
    counts = list(map(int, (await output(box, "cat log")).split()))
    assert counts == list(range(len(counts))), "nothing is written twice, nothing left out"


async def everything_comes_back_several_times_and_again(box, folder):
    await busy(box)
    assert box.capture_kinds == ("files", "process")
    before = await output(box, STATE)
    assert "sleep 1000" in before and "sleep 1001" in before and "http.server" in before
    assert "Seccomp:\t2" in before
    captured = await box.capture("process", folder / "one")
    assert await output(box, STATE) == before, "the sandbox went on as it was"
    await goes_on(box)
    await box.close()
    boxes = await asyncio.gather(*(Sandbox.restore(folder / "one") for _ in range(3)))
    for i, each in enumerate(boxes):
        assert await output(each, STATE) == before and each.lost == ""
        await output(each, f"SHOWN={i}; echo {i} > file; kill -USR1 $$")
    for i, each in enumerate(boxes):
        expected = f"b'{i}\\n'\n{i}\nkept\n"
        assert await output(each, f"{SERVED}; echo $SHOWN; cat /dev/shm/held") == expected
        await goes_on(each)
    again = await boxes[1].capture("process", folder / "two")
    assert captured.kind == again.kind == "process"
    await asyncio.gather(*(each.close() for each in boxes))
    async with await Sandbox.restore(folder / "two") as second:
        assert (await output(second, "echo $SHOWN; cat file")) == "1\n1\n"
        await goes_on(second)
        # as any other: late commands are stopped, it is checked, a shell that ends is replaced
        await second.run("kill %1; wait %1", LONG_S)  # else its sleeps are told of, too
        late = await second.run("sleep 1002", 3.0)  # by then it has begun
        assert late.note == "stopped: not done after 3 s" and not late.restarted
        assert await output(second, "echo $SHOWN; pgrep -fc '^sleep 100'") == "1\n2\n"
        (folder / "tests").mkdir()
        show = "cat deep/file; python3 -c 'import os; print(len(os.listdir(\"/proc\")) < 99)'"
        checked = await second.check(["/bin/bash", "-c", show], str(folder / "tests"))
        assert checked.code == 0 and checked.output == "1\nTrue\n", checked
        assert (await second.run("exit 3", LONG_S)).restarted
        assert await output(second, "cat /app/deep/file; pgrep -f '^sleep 100' || :") == "1\n"
        assert (await second.run("unshare -U true; mount -t tmpfs x /mnt", LONG_S)).code != 0


SOCKET = """
import socket
with socket.create_server("/app/sock", family=socket.AF_UNIX) as server:
    while True:
        server.accept()[0].sendall(b"here")
"""
CONNECT = """
import socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect("/app/sock")
sys.stdout.write(client.recv(9).decode())
"""


async def what_the_agent_has_built_and_where_it_listens_come_back(box, folder):
    """Programs and sockets that lie on the overlay, also as a copy of what the root has."""
    for name, text in (("server.py", SOCKET), ("client.py", CONNECT)):
        await box.write_file(f"/app/{name}", text.encode())
    await output(box, "cp $(readlink -f $(which sleep)) own; ./own 1000 & python3 server.py &")
    await output(box, "until pgrep -fx './own 1000' && python3 client.py 2>/dev/null; do :; done")
    async with again(box, folder / "c") as (other, _):
        for each in (box, other):
            assert await output(each, "pgrep -cfx './own 1000'; python3 client.py") == "1\nhere"


async def numbers_of_processes_go_on(box, folder):
    """The number of a job that has ended, or in a file, is not given out again."""
    ended = "for i in {1..60}; do /bin/true; done; (exit 9) & until test -z $(jobs -r); do :; done"
    await output(box, ended)
    used = "bash -c 'echo $$'"
    for kind in ("process", "files"):
        await box.capture(kind, folder / kind)
    newest = int(await output(box, used))
    async with await Sandbox.restore(folder / "process") as other:
        await output(other, "for i in {1..300}; do /bin/true; done")
        assert (await other.run("wait $!", LONG_S)).code == 9
    async with await Sandbox.restore(folder / "files") as other:
        assert int(await output(other, used)) >= newest - 20 > 340


UNREAD = """
import fcntl, os, pty, socket, sys, time
if sys.argv[1] == "datagram":
    kept = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    kept.bind(("127.0.0.1", 0))
    kept.sendto(b"x", kept.getsockname())
elif sys.argv[1] == "closed":
    kept, other = pty.openpty()
    os.write(other, b"said")
    os.close(other)
else:
    kept = pty.openpty()
    fcntl.fcntl(kept[0], fcntl.F_SETFL, os.O_NONBLOCK)
    try:
        while True:
            os.write(kept[0], bytes(500))
    except BlockingIOError:
        pass
open("/app/full", "w").close()
time.sleep(1000)
"""


async def what_is_not_captured_is_said(box, folder):
    await box.write_file("/app/unread.py", UNREAD.encode())
    until = "until test -e full; do sleep .01; done; rm full"
    await output(box, f"python3 unread.py datagram & {until}; ipcmk -Q")
    await output(box, f"python3 unread.py closed & {until}")
    async with again(box, folder / "c") as (other, _):
        assert "were not brought back: System V's" in other.lost, other.lost
        assert "unread datagrams" in other.lost and "a closed terminal" in other.lost, other.lost
    await output(box, f"python3 unread.py terminal & {until}")
    await refused(box.capture("process", folder / "d"), "a terminal has more unread")
    await box.capture("files", folder / "e")
    await output(box, "kill -0 $!")


async def pipes_and_removed_files_keep_what_is_in_them(box, folder):
    await output(
        box,
        "mkfifo pipe; exec 8<>pipe; echo waiting >&8; exec 9<>gone; echo still >&9; rm gone; "
        "(trap '' HUP; read -r line <&8; sleep 0; echo \"$line\" > told) & kill -STOP $!",
    )
    async with again(box, folder / "c") as (other, _):
        for each in (box, other):
            expected = "still\nls: cannot access 'gone': No such file or directory\n"
            assert await output(each, "cat /proc/$$/fd/9; ls gone 2>&1 || :") == expected
            await output(each, "kill -CONT $!; wait $!")
            assert await output(each, "cat told") == "waiting\n"


async def files_and_memory_are_of_one_moment(box, folder):
    """A program that first writes a file, then keeps in memory what it wrote."""
    await box.write_file(
        "/app/count.py",
        b"import os, sys\nn = 0\nfd = os.open('n', os.O_RDWR | os.O_CREAT)\n"
        b"import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"
        b"while True:\n    seen = int(os.pread(fd, 20, 0) or 0)\n"
        b"    if seen not in (n, n - 1):\n        open('torn', 'w').write(f'{seen} {n}')\n"
        b"    os.pwrite(fd, b'%d' % n, 0)\n    n += 1\n",
    )
    await output(box, "python3 count.py & until [ -s n ]; do sleep .01; done")
    for i in range(3):
        await box.capture("process", folder / f"{i}")
    for i in range(3):
        async with await Sandbox.restore(folder / f"{i}") as other:
            command = "a=$(cat n); until [ $(cat n) -gt $((a + 99)) ]; do :; done; ls"
            assert await output(other, command) == "count.py\nn\n"


async def what_can_not_be_captured_is_named_and_goes_on(box, folder):
    await box.write_file(
        "/app/own.py",
        b"import ctypes, struct, time\nallow = struct.pack('HBBI', 6, 0, 0, 0x7fff0000)\n"
        b"kept = ctypes.create_string_buffer(allow)\n"
        b"program = struct.pack('HxxxxxxQ', 1, ctypes.addressof(kept))\n"
        b"assert ctypes.CDLL(None).prctl(22, 2, program) == 0\nopen('set', 'w')\ntime.sleep(1000)\n",
    )
    await output(box, "X=1; python3 own.py & until [ -e set ]; do sleep .01; done")
    await refused(box.capture("process", folder / "c"), "has a filter of system calls of its own")
    assert not (folder / "c").exists()
    assert await output(box, "kill %1; wait; echo $X") == "1\n"
    await box.capture("process", folder / "c")


async def one_that_is_given_up_leaves_the_sandbox_as_it_is(box, folder):
    """CRIU is not killed at the deadline: it may have changed the processes just then."""
    await busy(box)
    before = await output(box, STATE)
    given_up, capture.WAIT_S = capture.WAIT_S, 0.001
    for i in range(5):
        try:
            await box.capture("process", folder / f"{i}")
        except SandboxError as error:
            assert "no capture within 0.001 s" in str(error) or "PTRACE" in str(error), error
            assert not (folder / f"{i}").exists()
        assert await output(box, STATE) == before
    await goes_on(box)
    capture.WAIT_S = given_up


ODD = r"""
mkdir -p d/e; echo one > d/one; ln d/one d/two; ln -s ../nowhere d/link; mkfifo d/pipe
python3 -c "
import os, socket
socket.socket(socket.AF_UNIX).bind('d/socket')
open(b'd/\xff\n\'', 'w').write('odd')
with open('d/sparse', 'wb') as f:
    f.seek(3 << 20); f.write(b'x'); f.truncate(20 << 20)
"
echo secret > d/none; chmod 0 d/none; mkdir d/closed; echo in > d/closed/f; chmod 0 d/closed
echo s > d/suid; chmod 6755 d/suid; touch -d @1.5 d/one; echo m > /dev/shm/memory
python3 -c "import os; os.setxattr('d/e', 'user.mark', b'\x00\xff')" 2>/dev/null || :
"""
SHOW = r"""find d /dev/shm -printf '%P %y %m %U %G %n %s %l %T@\n' | LC_ALL=C sort
python3 -c "
import os
for at, _, names in os.walk(b'd'):
    for name in sorted(names):
        p = at + b'/' + name
        if os.path.isfile(p): print(p, open(p, 'rb').read()[-9:])
try: print(os.getxattr('d/e', 'user.mark'))
except OSError: pass
"; du -k d/sparse; cat /dev/shm/memory"""


async def odd_files_come_back(box, folder):
    await output(box, ODD)
    before = await output(box, SHOW)
    async with again(box, folder / "c", "files") as (other, listing):
        assert {"file", "dir", "link", "fifo", "socket"} == {entry["kind"] for entry in listing}
        assert next(e for e in listing if e["path"] == "app/d/two")["same"] == "app/d/one"
        assert await output(other, SHOW) == before and other.lost == ""
        assert int((await output(other, "du -k d/sparse")).split()[0]) < 1024


async def what_an_image_had_is_still_gone(_, folder):
    """Whiteouts and opaque folders of the overlay."""
    files = {name: name for name in ("old/f", "old/g", "etc/kept", "etc/removed")}
    show = "ls /etc /old; stat -c %a /; cat /old/h /etc/kept"
    async with await Sandbox.start(of_image(folder / "image", files), "namespaces") as box:
        await output(box, "rm /etc/removed; rm -r /old; mkdir /old; echo new > /old/h; chmod 700 /")
        before = await output(box, show)
        assert "removed" not in before and "f\n" not in before
        async with again(box, folder / "c", "files") as (other, listing):
            assert "whiteout" in {entry["kind"] for entry in listing}
            assert await output(other, show) == before


async def only_what_changed_is_copied(box, folder):
    await output(box, "mkdir d; for i in $(seq 50); do echo $i > d/$i; done; sleep .1")
    one = await box.capture("files", folder / "one")
    await output(box, "echo x >> d/7; chmod 600 d/8; rm d/9; echo new > d/new; mv d/10 d/moved")
    two = await box.capture("files", folder / "two", since=one.listing)
    copied = {e["path"] for e in two.listing if e["data"]}
    # a file that was moved has its old content, but not at that path
    assert copied >= {"app/d/7", "app/d/new", "app/d/moved"}
    assert copied <= {"app/d/7", "app/d/new", "app/d/moved", "app/d/8"}
    assert len(os.listdir(folder / "two/data")) == len(copied)
    assert "app/d/9" not in {e["path"] for e in two.listing}
    await refused(Sandbox.restore(folder / "two"), "but in an earlier one")
    await output(
        box,
        "python3 -c \"\nimport mmap, time\nf = open('d/1', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0]\n"
        "open('ready', 'w')\nwhile m[0:1] != b'X':\n  m[0:1] = b'X'\ntime.sleep(1000)\" & "
        "until grep -q X d/1; do sleep .01; done; sleep .1",
    )
    three = await box.capture("files", folder / "three", since=two.listing)
    assert "app/d/1" in {e["path"] for e in three.listing if e["data"]}


async def who_waits_for_its_vfork_is_stopped_a_little_later(box, folder):
    """clone(CLONE_VM | CLONE_VFORK): the caller can't be stopped until the child, which runs C's
    usleep, has ended."""
    await box.write_file(
        "/app/forks.py",
        b"import ctypes, os\nlibc = ctypes.CDLL(None)\nstack = ctypes.create_string_buffer(1 << 16)\n"
        b"top = (ctypes.addressof(stack) + len(stack)) & ~15\nopen('begun', 'w')\nwhile True:\n"
        b"    libc.clone(libc.usleep, ctypes.c_void_p(top), 0x4100 | 17, ctypes.c_void_p(300000))\n"
        b"    os.wait()\n    open('log', 'a').write('x\\n')\n",
    )
    await output(box, "python3 forks.py & until [ -e begun ]; do sleep .01; done")
    for kind in ("files", "process"):
        await box.capture(kind, folder / kind)
        await output(box, "n=$(wc -l <log); until [ $(wc -l <log) -gt $n ]; do sleep .01; done")


async def a_shell_is_made_again_without_its_processes(box, folder):
    await busy(box)
    show = 'echo "$SHOWN" "$hidden" ${map[k]} $(twice x) $PWD $(umask); say; set -o | grep pipefail; trap -p'
    for kind in ("files", "process"):
        await box.capture(kind, folder / kind)
        async with await Sandbox.restore(folder / kind, kind="files") as other:
            assert await output(other, show) == (
                "a b line\nother v xx /app/deep 0027\nsaid\npipefail       \ton\n"
                "trap -- 'echo bye' SIGUSR1\n"
            )
            assert "not jobs, open files and processes:" in other.lost
            assert "python3" in other.lost and "sleep" in other.lost
            assert await output(other, "jobs; cat file") == "served\n"


async def damage_is_named(box, folder):
    """Checks of a listing or an account that test_capture.py doesn't make."""
    await busy(box)
    await box.capture("process", folder / "good")
    await refused(box.capture("files", folder / "good"), "no new folder")
    await box.close()

    def cut(path):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])

    def blank(path):
        path.write_bytes(bytes(path.stat().st_size))

    damages = {
        "not a whole capture": lambda at: os.remove(at / "about.json"),
        "0 bytes of": lambda at: shutil.rmtree(at / "image"),
        "not a whole capture:": lambda at: shutil.rmtree(at / "data"),
        "the listing is damaged": lambda at: cut(at / "listing.json"),
        "the listing is damaged: max": lambda at: (at / "listing.json").write_text("[" * 99_999),
        "No such file": lambda at: shutil.rmtree(at / "data") or (at / "data").mkdir(),
        "data has": lambda at: (at / "data/0").write_bytes(b"more than there was" * 1000),
        "pstree.img": lambda at: cut(at / "image/pstree.img"),
        "CRIU can't make the processes again": lambda at: blank(at / "image/pstree.img"),
        "last_pid: not a whole": lambda at: (at / "last_pid").write_text("x"),
        "an entry without all": lambda at: (at / "listing.json").write_text('[{"path": "x"}]'),
    }
    for words, damage in damages.items():
        shutil.copytree(folder / "good", folder / "bad")
        damage(folder / "bad")
        await refused(Sandbox.restore(folder / "bad"), words.strip(": "))
        shutil.rmtree(folder / "bad")
    async with await Sandbox.restore(folder / "good") as other:
        await goes_on(other)


async def gvisor_brings_all_back(_, folder):
    box = await Sandbox.start(Spec(), "gvisor")
    assert box.capture_kinds == ("process",)
    await output(
        box,
        "export SHOWN='a b'; hidden=1; twice() { echo $1$1; }; umask 027; exec 7>>log; echo one > file; "
        "(i=0; while :; do echo $((i++)) >&7; sleep .05; done) & until [ -s log ]; do sleep .05; done",
    )
    for kind, words in (
        ("files", "whose images include the processes"),
        ("none", "there are files"),
    ):
        await refused(box.capture(kind, folder / "none"), words)
    await box.capture("process", folder / "c")
    await output(box, "echo two > file; hidden=2")
    await box.close()
    boxes = await asyncio.gather(*(Sandbox.restore(folder / "c") for _ in range(2)))
    for i, each in enumerate(boxes):
        show = "echo $SHOWN $hidden $(twice x) $(umask) $(cat file) $(jobs -p | wc -l)"
        assert await output(each, show) == "a b 1 xx 0027 one 1\n"
        await output(each, f"echo {i} > file; hidden={i}")
        await goes_on(each)
    await boxes[1].capture("process", folder / "again")
    await asyncio.gather(*(each.close() for each in boxes))
    async with await Sandbox.restore(folder / "again") as last:
        assert await output(last, "echo $hidden; cat file") == "1\n1\n"
    image = next((folder / "c/image").iterdir())
    for data, words in ((bytes(image.stat().st_size), "runsc: "), (b"", "0 bytes of")):
        image.write_bytes(data)
        await refused(Sandbox.restore(folder / "c"), words)


def is_scenario(each):
    return inspect.iscoroutinefunction(each) and "folder" in inspect.signature(each).parameters


SCENARIOS = [each for each in list(globals().values()) if is_scenario(each)]


@contextlib.asynccontextmanager
async def place():
    with tempfile.TemporaryDirectory(prefix="rose-capture-") as folder:
        async with await start(LARGER) as box:
            yield box, Path(folder)


if __name__ == "__main__":
    asyncio.run(play(SCENARIOS, sys.argv[1:], place))
