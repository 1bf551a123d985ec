"""Commands with known effects, in one sandbox after the other turn of it: what the inspector says of each.

    python tests/parts/sandbox/effects.py

Prints a line for each command whose answer differs from what it needs, then a JSON object. Standard
library only: another user may have no other Python than the system's.
"""

import asyncio
import json
import statistics
import tempfile

from boxes import LONG_S, end, of_image

from rose.parts.sandbox import Sandbox
from rose.parts.sandbox.inspector import FILES, NONE, PROCESS, Inspector

SERVER = """\
import socket
server, count = socket.create_server(("127.0.0.1", 8000)), 0
while True:
    client, _ = server.accept()
    count += 1
    client.sendall(str(count).encode())
    client.close()
"""
IN_PLACE = """\
import mmap, sys
with open("/app/mapped", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
    before = memory[0] if sys.argv[1] == "read" else 0  # a page that was read is given writable
    memory[:1] = sys.argv[2].encode()
"""
DEAF = """\
import socket, time
bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
bound.bind("/tmp/deaf")
time.sleep(1000)
"""
TERMINAL = """\
import os, pty, time
master, slave = pty.openpty()
with open("/tmp/pts.new", "w") as file:
    file.write(os.ttyname(slave))
os.rename("/tmp/pts.new", "/tmp/pts")
time.sleep(1000)
"""
ASLEEP = """\
import ctypes, time
kept = ctypes.create_string_buffer(b"asleep")
with open("/tmp/address", "w") as file:
    file.write(str(ctypes.addressof(kept)))
time.sleep(1000)
"""
POKE = """\
import sys
with open("/tmp/address") as file, open(sys.argv[1], "r+b", buffering=0) as memory:
    memory.seek(int(file.read()))
    memory.write(b"poked!")
"""
POLLER = """\
import os, select
watched = select.poll()
watched.register(os.open("/app/polled", os.O_RDONLY | os.O_NONBLOCK), select.POLLIN)
open("/tmp/polls", "w").close()
watched.poll()
"""
# A process that sleeps, polls, accepts or reads by these calls, of x86-64 and arm64, does nothing
SETUP = """\
idle() { until grep -qE '^(230|115|288|242|7|271|73|0|63) ' /proc/$1/syscall; do :; done; }
head -c 8192 /dev/zero > mapped; echo one > f; echo two > g; mkdir d; echo 1 > d/in
ask() { local seen; read -r seen < /dev/tcp/127.0.0.1/8000; idle $server; }
ask; f() { local kept=1; kept=2; }; first=(); x=
"""

# Runs of commands by what each of them changes, in this order.
COMMANDS = [
    (NONE, "ls -la /usr /app", "cat f g > /dev/null", "echo hi; echo words >&2",
        "grep -r root /etc | head -2", "find / -xdev -name 'x*' 2>/dev/null | wc -l",
        "python3 -c 'print(sum(range(10**5)))'", "t=$(mktemp); echo x > $t; rm $t; unset t",
        "cp f d/copy && rm d/copy", "mkdir new && rmdir new",
        "X=1 true; (cd /; Y=2; umask 0; set -f)", "for i in 1 2 3; do echo $i; done; unset i",
        "bash -c 'cd /tmp; A=1; alias b=c'", "f", "cat <<< word; wc -c <<X\nlines\nX",
        "false | true; ! true", "exec 6<f; read -r -u 6 y; exec 6<&-; unset y",
        "sort -R /etc/passwd | head -1; type ls; command -v cat",
        "python3 -c \"import mmap; f = open('mapped'); mmap.mmap(f.fileno(), 0, prot=1)[0]\"",
        "jobs; trap; ulimit -a | wc -l; history; dirs",
        "set -o pipefail; true | true; set +o pipefail"),
    (PROCESS, "wait 2>/dev/null & wait $!; true",
        "true & until test \"$(jobs -r | wc -l)\" = 1; do :; done", "jobs > /dev/null"),
    (FILES, "echo three > h", "echo more >> h", "sed -i s/one/1/ f", ": > h",
        "touch -d 2001-01-01 h", "chmod 600 h",
        "python3 -c \"import os; os.setxattr('h', 'user.a', b'1')\"", "mv h i",
        "ln i j; ln -s i k", "truncate -s 100M sparse",
        "touch -r g /tmp/ref; cat g > /tmp/same; cat /tmp/same > g; touch -r /tmp/ref g",
        "cp g /tmp/g; cat /tmp/g > g; touch -r /tmp/ref g; rm /tmp/g", "rm /data/lower",
        "echo changed > /data/other", "rm -r d", "echo x > /dev/shm/x",
        "echo x > /tmp/x; mkdir -p /var/deep/er", "chmod 700 /var/deep/er",
        "touch -d 2001-01-01 /var/deep", "python3 /tmp/in_place.py write 1",
        "python3 /tmp/in_place.py read 2"),
    (NONE, "cat mapped > /dev/null"),
    (FILES, "mkfifo pipe", "rm -rf /var/deep /tmp/x sparse"),
    # the shell
    (PROCESS, "cd /tmp", "cd - > /dev/null", "umask 027", "set -o noclobber", "set -o errexit",
        "set +e", "set -m", "set +m", "enable -n printf"),
    (NONE, "ls > /dev/null"),
    (PROCESS, "enable printf", "shopt -s nullglob", "alias ll='ls -l'", "trap 'echo bye' USR1",
        "ulimit -n 512", "export WORD=1", "WORD=2", "export -n WORD", "g() { echo $1; }",
        "unset -f g", "read -r x < g"),
    (NONE, "read -r x < g"),
    (PROCESS, "first=(a b c)", "first[1]=d", "declare -A second=([k]=v)", "history -s 'a line'",
        "set -- a b", "[[ word =~ o(.) ]]", "pushd / > /dev/null; cd /app",
        "renice -n 18 $$ > /dev/null", "chrt -b -p 0 $$", "chrt -o -p 0 $$", "TMOUT=1"),
    (NONE, "ls > /dev/null"),
    (PROCESS, "unset TMOUT", "exec 7>>log"),
    (FILES, "echo a line >&7"),
    (PROCESS, "exec 8<>g", "read -r -u 8 x"),
    (FILES, "echo other >| f; cat g > /dev/null"),
    (PROCESS, "echo into what is open >| g", "exec 7>&- 8>&-", "exec 9<>pipe"),
    (NONE, "cat f > /dev/null"),
    (PROCESS, "echo data >&9", "read -r -u 9 -t 0.1 REPLY; unset REPLY"),
    (NONE, "cat f > /dev/null"),
    (PROCESS, "exec 8>lock", "flock -n 8"),
    (NONE, "ls > /dev/null"),
    (PROCESS, "flock -u 8", "exec 8>&- 9>&-", "SECONDS=5000"),
    (NONE, "ls > /dev/null"),
    # the background
    (PROCESS, "ask"),
    (NONE, "kill -0 $server; ps > /dev/null; ls /proc/$server/fd > /dev/null"),
    (PROCESS, "sleep 1000 & idle $!"),
    (NONE, "cat f > /dev/null"),
    (PROCESS, "disown", "renice -n 19 -p $(pgrep -x sleep) > /dev/null",
        "chrt -b -p 0 $(pgrep -x sleep)",
        "kill -STOP $(pgrep -x sleep); until grep -q '^State:.T' /proc/$(pgrep -x sleep)/status; do :; done",
        "kill -USR1 $(pgrep -x sleep)"),
    (NONE, "ls > /dev/null"),
    (PROCESS, "prlimit --pid $(pgrep -x sleep) --nofile=99",
        "exec 6<>gone; rm gone; sleep 1000 & idle $!; exec 6>&-", "echo new >| /proc/$!/fd/6"),
    (NONE, "ls > /dev/null"),
    (PROCESS, "kill $!; wait $! 2>/dev/null; true",
        "python3 /tmp/terminal.py & until test -s /tmp/pts; do :; done; idle $!"),
    (NONE, "ls > /dev/null"),
    # The kernel delivers what was written to a terminal later, in a thread of its own.
    (PROCESS, "echo hello > $(< /tmp/pts); sleep 0.5", "kill $!; wait $! 2>/dev/null; rm /tmp/pts",
        "mkfifo polled; python3 /tmp/poller.py & until test -e /tmp/polls; do :; done; idle $!"),
    (NONE, "ls > /dev/null", "ls > /dev/null"),
    (PROCESS, "kill $!; wait $! 2>/dev/null; rm polled /tmp/polls",
        "python3 /tmp/asleep.py & until test -s /tmp/address; do :; done; idle $!"),
    (NONE, "ls > /dev/null; cat /proc/$!/maps > /dev/null"),
    (PROCESS, "python3 /tmp/poke.py /proc/$!/mem", "python3 /tmp/poke.py /proc/$!/task/$!/mem"),
    (NONE, "ls > /dev/null"),
    (PROCESS, "kill $!; wait $! 2>/dev/null; rm /tmp/address",
        "python3 /tmp/deaf.py & until test -S /tmp/deaf; do :; done; idle $!"),
    (NONE, "ls > /dev/null"),
    (PROCESS, "python3 -c 'import socket; socket.socket(1, 2).sendto(b\"x\", \"/tmp/deaf\")'",
        "kill $!; wait $! 2>/dev/null; rm /tmp/deaf",
        "nohup sleep 1000 > /dev/null 2>&1 & idle $!", "kill $!; wait $! 2>/dev/null; true",
        "coproc C { exec cat; }; idle $C_PID",
        "echo hi >&${C[1]}; read -r -u ${C[0]} x; idle $C_PID"),
    (NONE, "ls > /dev/null"),
    (PROCESS, "while :; do echo $((++n)) >| /tmp/n; sleep .02; done & until test -s /tmp/n; do :; done",
        "a=$(< /tmp/n); until test \"$(< /tmp/n)\" != \"$a\"; do :; done; unset a",
        "kill $! && wait $! 2>/dev/null; true", "ipcmk -Q > /dev/null",
        "kill $server; wait $server 2>/dev/null; true"),
    (NONE, "true"),
]  # fmt: skip
STRENGTH = (NONE, FILES, PROCESS)


async def play(box: Sandbox) -> dict:
    """Counts, and the median time of a look in seconds."""
    inspector, answers, seconds = Inspector(box), [], []
    programs = {"in_place": IN_PLACE, "server": SERVER, "deaf": DEAF, "terminal": TERMINAL}
    programs |= {"poller": POLLER, "asleep": ASLEEP, "poke": POKE}
    for name, text in programs.items():
        await box.write_file(f"/tmp/{name}.py", text.encode())
    begin = "python3 /tmp/server.py & server=$!; until (: < /dev/tcp/127.0.0.1/8000) 2>/dev/null"
    made = await box.run(f"{begin}; do :; done; {SETUP}", LONG_S)
    assert made.code == 0, made
    first = await inspector.look()
    assert first.kind == PROCESS and first.why == "the first look", first
    for needs, command in ((needs, each) for needs, *commands in COMMANDS for each in commands):
        result = await box.run(command, LONG_S)
        change = await inspector.look()
        assert not result.restarted and result.code is not None, (command, result)
        answers.append((STRENGTH.index(change.kind), STRENGTH.index(needs)))
        seconds.append(change.seconds)
        if change.kind != needs:
            print(f"{command!r} needs {needs}, got {change.kind}: {change.why}", result.output)
    return {
        "commands": len(answers),
        "missed": sum(got < needs for got, needs in answers),
        "alarms": sum(got > needs for got, needs in answers),
        "look_ms": round(statistics.median(seconds) * 1e3, 2),
    }


async def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        passwd = "root:x:0:0:root:/root:/bin/bash\n"
        files = dict.fromkeys(("etc/passwd", "data/lower", "data/other"), passwd)
        async with await Sandbox.start(of_image(folder, files), "namespaces") as box:
            print(json.dumps(await play(box)))
    end()


if __name__ == "__main__":
    asyncio.run(main())
