"""What every backend of a sandbox takes and gives: limits, results, and the shell behind them."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

MIB = 1 << 20
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Runs inside of the sandbox: commands end with NUL on standard input, their output goes to standard
# output, and each one's exit code, ended by NUL, to standard error. Commands get none of the three.
# Instead of a command, `ACCOUNT` asks for the shell's state: a text in parts, ended by NUL, where
# exit codes go. A child tells it, since `declare` draws a random number. The shell itself lists the
# options, some of which bash switches off in children (errexit, monitor), and the jobs' table,
# which no child has, in ways that leave it as it is: `jobs -l` would forget the jobs that ended.
# The exit code is written where the loop begins again, which `continue` in a command can't skip.
# Where a command has disabled printf, echo writes. Where both or read are disabled, as by a
# function with the name of `builtin`, the shell ends; so it does after `set -n`, with which every
# condition is true. The session's own descriptors have numbers that scripts don't use (bash itself
# takes those from 63 downwards), and its own errors go nowhere, as does what `set -x` shows of it.
ACCOUNT = "\1"
SESSION = """\
exec 44<&0 45>&2 46>&1 0</dev/null 2>&0
__rose=$'\\1'
until
  case ${__rose-} in
    $'\\1') ;;
    *) __rose=$?; builtin printf '%s\\0' "$__rose" >&45 || builtin echo -ne "$__rose\\0" >&45 \\
         || ${__rose_nothing_writes:?}; builtin enable eval read ;;
  esac
  __rose=$'\\2'
  ! IFS= TMOUT= builtin read -r -d '' __rose <&44
do
  case $__rose in
  $'\\1')
    {
      builtin printf '\\1jobs\\n%s\\n' "${!-}" || builtin echo -E $'\\1jobs\\n'"${!-}"
      builtin jobs -p; builtin jobs -rl; builtin jobs -sl
      builtin printf '\\1traps\\n' || builtin echo $'\\1traps'; builtin trap -p
      builtin printf '\\1options\\n' || builtin echo $'\\1options'; builtin shopt -p; builtin set +o
      __rose=$(
        builtin printf '\\1builtins\\n' || builtin echo $'\\1builtins'
        builtin enable -a; builtin enable printf
        builtin printf '\\1variables\\n'; builtin declare -p
        builtin printf '\\1functions\\n'; builtin declare -f; builtin declare -F
        builtin printf '\\1aliases\\n'; builtin alias -p
        builtin printf '\\1folder and umask\\n'
        builtin printf 'builtin cd -- %q\\n' "$PWD"; builtin umask -p
        builtin printf '\\1limits\\n'; builtin ulimit -a; builtin ulimit -Ha
        builtin printf '\\1folders\\n'; builtin dirs -l
        builtin printf '\\1clock\\n%d\\n' "$((EPOCHSECONDS - SECONDS))"
        builtin printf '\\1arguments\\n%s' "$#"; builtin printf ' %q' "$@"
        builtin printf '\\1history\\n'; builtin history; builtin complete -p
        builtin printf '\\1end\\n'
      )
      builtin printf '%s' "$__rose" || builtin echo -nE "$__rose"
    } >&45 || builtin :
    __rose=$'\\1'
    { builtin printf '\\0' || builtin echo -ne '\\0'; } >&45 ;;
  $'\\2') ${__rose_nothing_reads:?} ;;
  *) builtin eval "$__rose" </dev/null >&46 2>&1 44<&- 45>&- 46>&- ;;
  esac
done
"""
# Folders of the root: a sandbox's own mounts, and the host's where there is no image
GUARDED = ("tests", "logs")  # a check mounts its own there
OWN_FOLDERS = (*GUARDED, "dev", "proc", "run")
HOST_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
COMMAND_BYTES = 64 * 1024  # of one command: bash reads it byte by byte


class SandboxError(Exception):
    """The sandbox can't be made, or is gone; the message names what and what would help."""


@dataclass(frozen=True)
class Limits:
    """Of one sandbox. Sizes in MiB; `disk_mib` bounds all files that it writes, and with
    `namespaces` they are in memory. `cpus` may be a fraction."""

    memory_mib: int = 1024
    disk_mib: int = 256
    files: int = 100_000
    processes: int = 128
    cpus: float = 1.0


@dataclass(frozen=True)
class Mount:
    """A folder of the host, read-only, inside of the sandbox."""

    source: str
    target: str


@dataclass(frozen=True)
class Spec:
    """`image`: the folder of a root file system, which stays as it is; None: the host's system
    folders, read-only. `workdir` is made, and the session begins there."""

    image: str | None = None
    workdir: str = "/app"
    mounts: tuple[Mount, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.image is not None and not os.path.isdir(self.image):
            raise SandboxError(
                f"image={self.image!r}: no such folder; give that of an unpacked root file system"
            )
        if not os.path.isabs(self.workdir) or os.path.normpath(self.workdir) == "/":
            raise SandboxError(f"workdir={self.workdir!r}: a path from the root, below /")
        parts = self.workdir.split("/")
        taken = OWN_FOLDERS + ((*HOST_FOLDERS, "etc") if self.image is None else ())
        if ".." in parts or "\0" in self.workdir or next(filter(None, parts)) in taken:
            raise SandboxError(
                f"workdir={self.workdir!r}: without .. and outside of {', '.join(taken)}"
            )
        for key, value in asdict(self.limits).items():
            kind, words = (int | float, "a") if key == "cpus" else (int, "a whole")
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
                raise SandboxError(f"limits.{key}={value!r}: {words} number above 0")

    def variables(self) -> dict[str, str]:
        """The environment of the sandbox's programs."""
        fixed = {"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}
        return {**fixed, "USER": "root", **self.environment}


@dataclass(frozen=True)
class Result:
    """What a command did. `output`: its first `limit` bytes; `note`: in words, what was done about
    it, "" when it just ran. `code` is None when it had to be stopped or its shell ended."""

    output: str
    code: int | None
    note: str = ""
    seconds: float = 0.0
    restarted: bool = False  # the session is a new one: its variables are lost, files are kept

    def words(self) -> str:
        """For an agent: output, then what happened unless all went well."""
        note = self.note or (f"exit code {self.code}" if self.code else "")
        parts = (self.output.rstrip("\n"), f"[{note}]" if note else "")
        return "\n".join(part for part in parts if part) or "[no output]"


@dataclass(frozen=True)
class Fresh:
    """What a process outside of the session did: exit code (None: stopped at its deadline), the
    beginning of its output, and the files that were asked for and are there."""

    code: int | None
    output: str
    files: dict[str, bytes]


class Shell(Protocol):
    """One running sandbox of a backend. The three file descriptors are non-blocking; after
    `restart` they are the same or new ones."""

    keeps_files: bool  # of a session that is begun anew
    commands: int  # write: commands, each ended by NUL
    output: int  # read
    codes: int  # read: exit codes, each ended by NUL

    def on_end(self, callback: Any) -> None:
        """`callback(words)` once when the session's bash has ended."""

    async def restart(self, cwd: str | None) -> None:
        """End every process of the sandbox and begin a new session. Raises `SandboxError`."""

    async def stop_since(self, ticks: int) -> bool:
        """End the processes, but for the session's bash, that were started since `ticks` (of
        1 / SC_CLK_TCK s after boot). False if this backend can't."""

    async def idle(self) -> bool:
        """Return whether the session has taken all that was written and waits for its next command;
        False if this backend can't see it."""

    async def cwd(self) -> str | None: ...

    async def look(self) -> dict[str, Any]:
        """What changed since the last look (`watch.Watch.look`). Raises OSError if it can't be
        seen now, NotImplementedError if this backend never sees it."""

    async def resume(self) -> None:
        """After the processes were saved: that they ran for it is no change."""

    async def read(self, path: str, limit: int) -> bytes:
        """The beginning of the regular file `path`. Raises OSError."""

    async def write(self, path: str, data: bytes) -> None:
        """Raises OSError."""

    async def fresh(
        self, argv: list[str], files: bytes, at: str, collect: list[str], limit: int, wait_s: float
    ) -> Fresh:
        """Run `argv` beside the session, unseen by it, with `files` (a tar) in the folder `at`."""

    def captures(self) -> dict[str, str]:
        """Kind of capture (capture.py) -> why it doesn't work here, "" if it does."""

    async def close(self) -> None: ...
