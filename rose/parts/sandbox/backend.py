"""The types that all backends of sandboxes share: limits, results, and the interface to a shell."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

MIB = 1 << 20
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The script of a session's bash. It reads commands from standard input, each ended by NUL. Their
# output goes to standard output, and each exit code, ended by NUL, to standard error.
# If the command is `ACCOUNT`, the script prints the shell's state to standard error, in named parts
# and ended by NUL. A subshell prints most parts, because printing RANDOM changes its next value.
# The shell itself prints its options and job table, because subshells switch some options off
# (errexit, monitor) and have no job table. `jobs -l` would remove ended jobs from the table.
# The loop's condition writes the exit code, so `continue` in a command can't skip that.
# If a command has disabled printf, echo writes the exit code. The shell ends if neither works. It
# also ends if `read` doesn't work, for example because a function is named `builtin`.
# The shell also ends after `set -n`, with which bash takes every condition as true.
# Commands don't inherit the session's descriptors 44 to 46. Scripts seldom use these numbers; bash
# assigns numbers from 63 downwards. The session's own errors and `set -x` lines are discarded.
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
# A check (check.py) is a program that judges a sandbox's final state. Its files are mounted here.
GUARDED = ("tests", "logs")
# Folders that every sandbox has as mounts, and folders of the host for sandboxes without an image.
OWN_FOLDERS = (*GUARDED, "dev", "proc", "run")
HOST_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
COMMAND_BYTES = 64 * 1024  # most bytes of a command (bash reads byte by byte)


class SandboxError(Exception):
    """A sandbox can't be created, or has ended. The message names the cause and a remedy."""


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox. `disk_mib` bounds the total size of the files that the sandbox writes;
    the backend `namespaces` keeps them in memory. `files` bounds their number."""

    memory_mib: int = 1024
    disk_mib: int = 256
    files: int = 100_000
    processes: int = 128
    cpus: float = 1.0


@dataclass(frozen=True)
class Mount:
    """A folder of the host that is mounted read-only in the sandbox."""

    source: str
    target: str


@dataclass(frozen=True)
class Spec:
    """Specification of a new sandbox. `image`: folder of a root file system, which is not changed;
    None: the host's system folders, read-only. `workdir` is created; sessions start there."""

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
        """Return the environment variables of the sandbox's programs."""
        fixed = {"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}
        return {**fixed, "USER": "root", **self.environment}


@dataclass(frozen=True)
class Result:
    """The outcome of a command. `output`: the first bytes that it printed. `note`: a text if the
    sandbox stopped the command or cut its output, else "". `code`: the exit code; None if the
    command was stopped or its shell ended."""

    output: str
    code: int | None
    note: str = ""
    seconds: float = 0.0
    restarted: bool = False  # True after the loss of the shell's variables and processes

    def words(self) -> str:
        """Return the text for an agent: the output, then the note or an exit code other than 0."""
        note = self.note or (f"exit code {self.code}" if self.code else "")
        parts = (self.output.rstrip("\n"), f"[{note}]" if note else "")
        return "\n".join(part for part in parts if part) or "[no output]"


@dataclass(frozen=True)
class Fresh:
    """The outcome of a program outside of the session, such as a check. `code`: exit code; None if
    it was stopped. `output`: its first bytes. `files`: path -> content of a requested file."""

    code: int | None
    output: str
    files: dict[str, bytes]


class Shell(Protocol):
    """A running sandbox. The file descriptors are non-blocking, and `restart` may replace them."""

    keeps_files: bool  # True if files survive `restart`
    commands: int  # write end: commands, each ended by NUL
    output: int  # read end: what commands print
    codes: int  # read end: exit codes, each ended by NUL

    def on_end(self, callback: Any) -> None:
        """Call `callback(words)` when the session's bash has ended. `words`: why the whole sandbox
        ended; "" if only the session did."""

    async def restart(self, cwd: str | None) -> None:
        """End every process of the sandbox and start a new session. Raises `SandboxError`."""

    async def stop_since(self, ticks: int) -> bool:
        """Kill the processes that started at `ticks` (clock ticks after boot) or later, except the
        session's bash. Return False if this backend can't."""

    async def idle(self) -> bool:
        """Return whether the session waits for its next command; False if that is unknown here."""

    async def cwd(self) -> str | None:
        """Return the session's working directory; None if it is unknown."""

    async def look(self) -> dict[str, Any]:
        """Return what changed since the last call (`watch.Watch.look`). Raises OSError if that
        can't be found out now, and NotImplementedError if this backend never can."""

    async def resume(self) -> None:
        """Have the next `look` ignore that processes ran because of a capture."""

    async def read(self, path: str, limit: int) -> bytes:
        """Return the first `limit` bytes of the regular file `path`. Raises OSError."""

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace the file `path`. Raises OSError."""

    async def fresh(
        self, argv: list[str], files: bytes, at: str, collect: list[str], limit: int, wait_s: float
    ) -> Fresh:
        """Run `argv` hidden from the session, for `wait_s` at most. The tar `files` is unpacked in
        `at`. Return at most `limit` bytes of output and of each file in `collect`."""

    def captures(self) -> dict[str, str]:
        """Return a mapping: kind of capture (capture.py) -> why it doesn't work here, else ""."""

    async def close(self) -> None: ...
