"""The command `rose`, which runs `python launch.py` and the modules from any folder.

    rose train [KEY=VALUE ...]       train, as python launch.py does
    rose simulate [KEY=VALUE ...]    ... with mode=simulate: the same on a simulated cluster
    rose plan [KEY=VALUE ...]        ... with mode=plan: how many GPUs it needs
    rose serve name=RUN [...]        lend this process's share of a serving node to a run
    rose relay UPSTREAM [...]        copy weight versions over a slow link once, for many engines
    rose export RUN [...]            write a run's policy as a model folder
    rose play RUN [...]              watch the policy play a held-out task in this terminal
    rose show RUN [...]              list a run's trajectories, or show one as a conversation
    rose state RUN [...]             show the state of runs and their Slurm jobs
    rose doctor [KEY=VALUE ...]      check what works on this machine or cluster
    rose slurm                       print a folder: sbatch $(rose slurm)/serving.sbatch name=RUN

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
    """Run the command that the arguments name and return its exit code. If the reader of its output
    has exited, as with `rose --help | head`, print no error and return SIGPIPE's code."""
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
    """Run the command `name` and return its exit code."""
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
    """Map each command to the module that it runs; includes the commands that parts add."""
    return MODULES | extensions.merged("commands", "COMMANDS")


def _complete(arguments: list[str]) -> int:
    """Print completions for the shell. Hydra's shell function calls `rose -sc query=bash` with the
    line in COMP_LINE. `rose` completes the command's name, Hydra the words after it."""
    line = os.environ.get("COMP_LINE", "")
    # A command's name is complete once white space follows it.
    command = re.match(r"\s*\S+\s+(\S+)\s", line)
    known = command and command[1] in {*MODES, "doctor"}
    if arguments[:1] == ["query=bash"] and not known:
        print(*MODES, *_modules(), "slurm")
        return 0
    os.environ["COMP_LINE"] = re.sub(r"^(\s*\S+)\s+\S+", r"\1", line)
    return _front("train", ["-sc", *arguments])


def _front(name: str, arguments: list[str]) -> int:
    """Run `python launch.py` (rose/front.py) with mode=`name` and return its exit code."""
    try:
        from rose import front
        from rose.places import CONF
    except KeyboardInterrupt:  # Ctrl-C during the imports, which take seconds
        return 130
    mode = [] if name == "train" else [f"mode={name}"]
    if name != "train" and any(a.startswith("mode=") for a in arguments):
        print(f"rose {name}: mode={name} is given by the command; leave mode= out", file=sys.stderr)
        return 2
    sys.argv = [sys.argv[0], *arguments]
    return front.main(CONF, [*mode, *arguments], "rose train")


if __name__ == "__main__":
    sys.exit(main())
