"""Commands with known effects, in one sandbox after the other turn of it: what the inspector says of each.

    python tests/parts/sandbox/effects.py

Prints a line for each command whose answer differs from what it needs, then a JSON object. Standard
library only: another user may have no other Python than the system's.
"""

import asyncio
import json
import statistics
import sys
import tempfile

from boxes import LONG_S, of_image

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

COMMANDS = [
    # nothing
    ("ls -la /usr /app", NONE),
    ("cat f g > /dev/null", NONE),
    ("echo hi; echo words >&2", NONE),
    ("grep -r root /etc | head -2", NONE),
    ("find / -xdev -name 'x*' 2>/dev/null | wc -l", NONE),
    ("python3 -c 'print(sum(range(10**5)))'", NONE),
    ("t=$(mktemp); echo x > $t; rm $t; unset t", NONE),
    ("cp f d/copy && rm d/copy", NONE),
    ("mkdir new && rmdir new", NONE),
    ("X=1 true; (cd /; Y=2; umask 0; set -f)", NONE),
    ("for i in 1 2 3; do echo $i; done; unset i", NONE),
    ("bash -c 'cd /tmp; A=1; alias b=c'", NONE),
    ("f", NONE),
    ("cat <<< word; wc -c <<X\nlines\nX", NONE),
    ("false | true; ! true", NONE),
    ("exec 6<f; read -r -u 6 y; exec 6<&-; unset y", NONE),
    ("sort -R /etc/passwd | head -1; type ls; command -v cat", NONE),
    ("python3 -c \"import mmap; f = open('mapped'); mmap.mmap(f.fileno(), 0, prot=1)[0]\"", NONE),
    ("jobs; trap; ulimit -a | wc -l; history; dirs", NONE),
    ("set -o pipefail; true | true; set +o pipefail", NONE),
    ("wait 2>/dev/null & wait $!; true", PROCESS),  # $! is another one
    ("true & until test \"$(jobs -r | wc -l)\" = 1; do :; done", PROCESS),
    ("jobs > /dev/null", PROCESS),  # forgets the job that ended
    # files
    ("echo three > h", FILES),
    ("echo more >> h", FILES),
    ("sed -i s/one/1/ f", FILES),
    (": > h", FILES),
    ("touch -d 2001-01-01 h", FILES),
    ("chmod 600 h", FILES),
    ("python3 -c \"import os; os.setxattr('h', 'user.a', b'1')\"", FILES),
    ("mv h i", FILES),
    ("ln i j; ln -s i k", FILES),
    ("truncate -s 100M sparse", FILES),
    ("touch -r g /tmp/ref; cat g > /tmp/same; cat /tmp/same > g; touch -r /tmp/ref g", FILES),
    ("cp g /tmp/g; cat /tmp/g > g; touch -r /tmp/ref g; rm /tmp/g", FILES),
    ("rm /data/lower", FILES),
    ("echo changed > /data/other", FILES),
    ("rm -r d", FILES),
    ("echo x > /dev/shm/x", FILES),
    ("echo x > /tmp/x; mkdir -p /var/deep/er", FILES),
    ("chmod 700 /var/deep/er", FILES),
    ("touch -d 2001-01-01 /var/deep", FILES),
    ("python3 /tmp/in_place.py write 1", FILES),
    ("python3 /tmp/in_place.py read 2", FILES),
    ("cat mapped > /dev/null", NONE),
    ("mkfifo pipe", FILES),
    ("rm -rf /var/deep /tmp/x sparse", FILES),
    # the shell
    ("cd /tmp", PROCESS),
    ("cd - > /dev/null", PROCESS),
    ("umask 027", PROCESS),
    ("set -o noclobber", PROCESS),
    ("set -o errexit", PROCESS),
    ("set +e", PROCESS),
    ("set -m", PROCESS),
    ("set +m", PROCESS),
    ("enable -n printf", PROCESS),
    ("ls > /dev/null", NONE),
    ("enable printf", PROCESS),
    ("shopt -s nullglob", PROCESS),
    ("alias ll='ls -l'", PROCESS),
    ("trap 'echo bye' USR1", PROCESS),
    ("ulimit -n 512", PROCESS),
    ("export WORD=1", PROCESS),
    ("WORD=2", PROCESS),
    ("export -n WORD", PROCESS),
    ("g() { echo $1; }", PROCESS),
    ("unset -f g", PROCESS),
    ("read -r x < g", PROCESS),
    ("read -r x < g", NONE),
    ("first=(a b c)", PROCESS),
    ("first[1]=d", PROCESS),
    ("declare -A second=([k]=v)", PROCESS),
    ("history -s 'a line'", PROCESS),
    ("set -- a b", PROCESS),
    ("[[ word =~ o(.) ]]", PROCESS),
    ("pushd / > /dev/null; cd /app", PROCESS),
    ("renice -n 18 $$ > /dev/null", PROCESS),
    ("chrt -b -p 0 $$", PROCESS),
    ("chrt -o -p 0 $$", PROCESS),
    ("TMOUT=1", PROCESS),
    ("ls > /dev/null", NONE),
    ("unset TMOUT", PROCESS),
    ("exec 7>>log", PROCESS),
    ("echo a line >&7", FILES),
    ("exec 8<>g", PROCESS),
    ("read -r -u 8 x", PROCESS),
    ("echo other >| f; cat g > /dev/null", FILES),
    ("echo into what is open >| g", PROCESS),
    ("exec 7>&- 8>&-", PROCESS),
    ("exec 9<>pipe", PROCESS),
    ("cat f > /dev/null", NONE),
    ("echo data >&9", PROCESS),
    ("read -r -u 9 -t 0.1 REPLY; unset REPLY", PROCESS),
    ("cat f > /dev/null", NONE),
    ("exec 8>lock", PROCESS),
    ("flock -n 8", PROCESS),
    ("ls > /dev/null", NONE),
    ("flock -u 8", PROCESS),
    ("exec 8>&- 9>&-", PROCESS),
    ("SECONDS=5000", PROCESS),
    ("ls > /dev/null", NONE),
    # the background
    ("ask", PROCESS),
    ("kill -0 $server; ps > /dev/null; ls /proc/$server/fd > /dev/null", NONE),
    ("sleep 1000 & idle $!", PROCESS),
    ("cat f > /dev/null", NONE),
    ("disown", PROCESS),
    ("renice -n 19 -p $(pgrep -x sleep) > /dev/null", PROCESS),
    ("chrt -b -p 0 $(pgrep -x sleep)", PROCESS),
    ("kill -STOP $(pgrep -x sleep); until grep -q '^State:.T' /proc/$(pgrep -x sleep)/status; do :; done", PROCESS),
    ("kill -USR1 $(pgrep -x sleep)", PROCESS),
    ("ls > /dev/null", NONE),
    ("prlimit --pid $(pgrep -x sleep) --nofile=99", PROCESS),
    ("exec 6<>gone; rm gone; sleep 1000 & idle $!; exec 6>&-", PROCESS),
    ("echo new >| /proc/$!/fd/6", PROCESS),
    ("ls > /dev/null", NONE),
    ("kill $!; wait $! 2>/dev/null; true", PROCESS),
    ("python3 /tmp/terminal.py & until test -s /tmp/pts; do :; done; idle $!", PROCESS),
    ("ls > /dev/null", NONE),
    ("echo hello > $(< /tmp/pts)", PROCESS),
    ("kill $!; wait $! 2>/dev/null; rm /tmp/pts", PROCESS),
    ("mkfifo polled; python3 /tmp/poller.py & until test -e /tmp/polls; do :; done; idle $!", PROCESS),
    ("ls > /dev/null", NONE),
    ("ls > /dev/null", NONE),
    ("kill $!; wait $! 2>/dev/null; rm polled /tmp/polls", PROCESS),
    ("python3 /tmp/asleep.py & until test -s /tmp/address; do :; done; idle $!", PROCESS),
    ("ls > /dev/null; cat /proc/$!/maps > /dev/null", NONE),
    ("python3 /tmp/poke.py /proc/$!/mem", PROCESS),
    ("python3 /tmp/poke.py /proc/$!/task/$!/mem", PROCESS),
    ("ls > /dev/null", NONE),
    ("kill $!; wait $! 2>/dev/null; rm /tmp/address", PROCESS),
    ("python3 /tmp/deaf.py & until test -S /tmp/deaf; do :; done; idle $!", PROCESS),
    ("ls > /dev/null", NONE),
    ("python3 -c 'import socket; socket.socket(1, 2).sendto(b\"x\", \"/tmp/deaf\")'", PROCESS),
    ("kill $!; wait $! 2>/dev/null; rm /tmp/deaf", PROCESS),
    ("nohup sleep 1000 > /dev/null 2>&1 & idle $!", PROCESS),
    ("kill $!; wait $! 2>/dev/null; true", PROCESS),
    ("coproc C { exec cat; }; idle $C_PID", PROCESS),
    ("echo hi >&${C[1]}; read -r -u ${C[0]} x; idle $C_PID", PROCESS),
    ("ls > /dev/null", NONE),
    ("while :; do echo $((++n)) >| /tmp/n; sleep .02; done & until test -s /tmp/n; do :; done", PROCESS),
    ("a=$(< /tmp/n); until test \"$(< /tmp/n)\" != \"$a\"; do :; done; unset a", PROCESS),
    ("kill $! && wait $! 2>/dev/null; true", PROCESS),
    ("ipcmk -Q > /dev/null", PROCESS),
    ("kill $server; wait $server 2>/dev/null; true", PROCESS),
    ("true", NONE),
]  # fmt: skip
STRENGTH = (NONE, FILES, PROCESS)


async def play(box: Sandbox) -> dict:
    """Counts, and the median time of a look in seconds."""
    inspector, answers, seconds = Inspector(box), [], []
    programs = {"in_place": IN_PLACE, "server": SERVER, "deaf": DEAF, "terminal": TERMINAL}
    programs |= {"poller": POLLER, "asleep": ASLEEP, "poke": POKE}
    for name, text in programs.items():
        await box.write_file(f"/tmp/{name}.py", text.encode())
    made = await box.run(
        "python3 /tmp/server.py & server=$!; until (: < /dev/tcp/127.0.0.1/8000) 2>/dev/null; "
        f"do :; done; {SETUP}",
        LONG_S,
    )
    assert made.code == 0, made
    first = await inspector.look()
    assert first.kind == PROCESS and first.why == "the first look", first
    for command, needs in COMMANDS:
        result = await box.run(command, LONG_S)
        change = await inspector.look()
        assert not result.restarted and result.code is not None, (command, result)
        answers.append((STRENGTH.index(change.kind), STRENGTH.index(needs)))
        seconds.append(change.seconds)
        if change.kind != needs:
            print(f"{command!r} needs {needs}, got {change.kind}: {change.why}", result.output)
    return {
        "commands": len(COMMANDS),
        "missed": sum(got < needs for got, needs in answers),
        "alarms": sum(got > needs for got, needs in answers),
        "look_ms": round(statistics.median(seconds) * 1e3, 2),
    }


async def main() -> None:
    from rose.parts.sandbox.probe import close, keeper

    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        passwd = "root:x:0:0:root:/root:/bin/bash\n"
        files = dict.fromkeys(("etc/passwd", "data/lower", "data/other"), passwd)
        async with await Sandbox.start(of_image(folder, files), "namespaces") as box:
            counts = await play(box)
        print(json.dumps({"user": "root" if keeper().root else "rootless"} | counts))
        close()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
