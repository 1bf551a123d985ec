"""Lend this process's share of a serving node to a training run while the run lasts.

    rose serve name=frozenlake [output_dir=outputs] [rollout.threads=2 ...]

This process finds the run by its name, joins it over MPI, and generates turns with its own engine.
It leaves at once on SIGTERM or SIGINT. On SIGUSR2 it first finishes its turns, for serving.drain_s
at most. If the run stops, this process waits serving.wait_s for it. If the run is finished, this
process ends. Keys of rollout, serving and cluster may differ from the run's. Start one process per
engine: alone, by srun in a serving job (slurm/serving.sbatch), or beside a server.

With serving.online.model it also starts an online server on the same device, whose users come first
(docs/serving.md):

    rose serve name=frozenlake serving.online.model=FOLDER \\
           serving.online.slo="{ttft_p50_s: 0.2, ...}" serving.lending.profile=FILE

The server serves before, during and after the run, until SIGTERM, SIGINT or SIGUSR2. Without a
profile or targets, it serves but nothing is lent. SIGUSR1 stops lending at once, SIGRTMIN (34)
starts it again.

Exit codes: 0 left, or the run is finished or never came; 1 refused, a disk refuses writes, or the
engine failed repeatedly; 2 bad arguments.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from rose.config import ConfigError
from rose.config.checks import NAME
from rose.engine import plugin
from rose.files import REMEDIES
from rose.parts.lending import settings
from rose.parts.lending.operator import operate
from rose.parts.lending.rank.lender import Lender


def main(arguments: list[str]) -> int:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return 0
    try:
        given = settings.parse(arguments)
        if "name" not in given:
            raise ConfigError("name is missing: which run? as rose serve name=frozenlake")
        name, output_dir = given["name"], given.get("output_dir", "outputs")
        run_dir = Path(output_dir, name).expanduser().resolve()
        # The folder of an old run may have been renamed to a name that no new run can have.
        if NAME.fullmatch(name) is None and not (run_dir / "config.json").is_file():
            raise ConfigError(f"name={name!r}: is no run's name; as rose serve name=lake")
        overrides = [a for a in arguments if a.partition("=")[0] not in ("name", "output_dir")]
        if not run_dir.parent.is_dir():
            raise ConfigError(
                f"output_dir={str(run_dir.parent)!r}: no such folder here; give the one that the "
                "run's launch.py had"
            )
        serving = settings.of_server(overrides)
        # Only lend if no server is wanted, or if an operator started this beside its server.
        if serving.online.model is None or plugin.FOLDER in os.environ:
            return Lender(run_dir, overrides).run()
        measured = None
        if serving.lending.profile is not None:
            from rose.parts.lending import device_profile

            measured = device_profile.load(serving.lending.profile)
        serving = msgspec.structs.replace(serving, online=settings.online_folder(serving.online))
        return operate.Operator(run_dir, overrides, serving, measured).run()
    except ConfigError as error:
        print(f"rose serve: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        remedy = REMEDIES.get(error.errno or 0, "this user must be able to write there")
        print(f"rose serve: {error.filename}: {error.strerror}; {remedy}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
