"""The command `rose`, which runs `python launch.py` and the modules from any folder.

    rose train [KEY=VALUE ...]       train, as python launch.py does
    rose simulate [KEY=VALUE ...]    ... with mode=simulate: the same on a simulated cluster
    rose plan [KEY=VALUE ...]        ... with mode=plan: how many GPUs it needs
    rose serve name=RUN [...]        lend this process's share of a serving node to a run
    rose relay UPSTREAM [...]        weight versions over a slow link once, for many engines
    rose export RUN [...]            a model folder of a run
    rose play RUN [...]              the policy plays a held-out task in this terminal
    rose show RUN [...]              trajectories of a run: a list, or one as a conversation
    rose state RUN [...]             what became of runs and their Slurm jobs
    rose doctor [KEY=VALUE ...]      what works on this machine or cluster
    rose slurm                       a folder: sbatch $(rose slurm)/serving.sbatch name=RUN

`rose COMMAND --help` says more. Completion in bash: eval "$(rose -sc install=bash)".
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys

from rose import extensions

MODES = ("train", "simulate", "plan")
MODULES = {"export": "rose.export", "state": "rose.launch.state"}


def main() -> int:
    """Run the command that the arguments name. Return its exit code; quietly that of SIGPIPE if
    what it printed met a reader that has exited, as with `rose --help | head`."""
    try:
        try:
            code = _run(*(sys.argv[1:] or ["--help"]))
        except SystemExit as end:
            if isinstance(end.code, str):  # a message for stderr
                raise
            code = int(end.code or 0)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        from rose.observe import terminal

        if not terminal.reader_has_left():
            raise
        return 128 + signal.SIGPIPE


def _run(name: str, *arguments: str) -> int:
    if name in ("-h", "--help", "help"):
        print(__doc__)
        return 0
    if name == "-sc":
        return _complete([*arguments])
    if name in MODES:
        return _front(name, [*arguments])
    if name == "slurm":
        from rose.places import SLURM

        print(SLURM)
        return 0
    modules = _modules()
    if name not in modules:
        print(
            f"rose: no command {name!r}; there are {', '.join([*MODES, *modules, 'slurm'])}",
            file=sys.stderr,
        )
        return 2
    sys.argv = [f"rose {name}", *arguments]
    runpy.run_module(modules[name], run_name="__main__", alter_sys=True)
    return 0


def _modules() -> dict[str, str]:
    """Return the module that each command runs, those of parts included."""
    return MODULES | extensions.merged("commands", "COMMANDS")


def _complete(arguments: list[str]) -> int:
    """Complete a command line: Hydra's shell function calls `rose -sc query=bash` with the line in
    COMP_LINE. The first word is a command of `rose`; Hydra completes the others."""
    line = os.environ.get("COMP_LINE", "")
    # A command that is typed whole: white space follows it.
    command = re.match(r"\s*\S+\s+(\S+)\s", line)
    known = command and command[1] in {*MODES, "doctor"}
    if arguments[:1] == ["query=bash"] and not known:
        print(*MODES, *_modules(), "slurm")
        return 0
    os.environ["COMP_LINE"] = re.sub(r"^(\s*\S+)\s+\S+", r"\1", line)
    return _front("train", ["-sc", *arguments])


def _front(name: str, arguments: list[str]) -> int:
    """Run launch.py's front door with the mode that this command names."""
    try:
        from rose import front
        from rose.places import CONF
    except KeyboardInterrupt:  # importing takes seconds
        return 130
    mode = [] if name == "train" else [f"mode={name}"]
    if name != "train" and any(a.startswith("mode=") for a in arguments):
        print(f"rose {name}: mode={name} is given by the command; leave mode= out", file=sys.stderr)
        return 2
    sys.argv = [sys.argv[0], *arguments]
    return front.main(CONF, [*mode, *arguments], "rose train")


if __name__ == "__main__":
    sys.exit(main())
