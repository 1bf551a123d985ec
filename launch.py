"""ROSE's front door: runs the training that conf/ and the command line describe.

    python launch.py                                  the default run, on this machine
    python launch.py trainer.steps=50 name=longer     with overrides
    python launch.py +experiment=qwen7b cluster.dry_run=true
    python launch.py -m seed=1,2,3                    a sweep, one run after the other
Left out: everything; see rose/front.py.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def start():
    if sys.version_info < (3, 11):
        return refuse("needs Python 3.11 or newer, and this is %d.%d" % sys.version_info[:2])
    sys.path.insert(0, str(HERE))
    try:
        from rose.front import main
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "rose":
            raise
        return refuse("the package %s is not installed for %s" % (error.name, sys.executable))
    except KeyboardInterrupt:  # importing takes seconds; SIGTERM still has its default effect
        return 130
    return main(HERE / "conf", sys.argv[1:])


def refuse(reason):
    sys.stderr.write(
        "launch.py: %s.\nRun `make train` once (it makes %s), then `. .venv/bin/activate` or "
        "`.venv/bin/python launch.py`.\nOn GPUs: `make gpu` instead.\n" % (reason, HERE / ".venv")
    )
    return 2


if __name__ == "__main__":
    sys.exit(start())
