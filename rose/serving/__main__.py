"""Lend this process's share of a serving node to a training run, whenever that runs.

    python -m rose.serving name=frozenlake [output_dir=outputs] [rollout.threads=2 ...]

Finds the run by its name, joins it over MPI, takes turns with an engine of its own, and leaves: at once on SIGTERM or
SIGINT, after its turns (serving.drain_s at most) on SIGUSR2. A run that ends or vanishes is waited for
(serving.wait_s); one that is finished ends this command too. Keys of rollout, serving and cluster may differ from
the run's. Start one per engine: alone, by srun in a serving job (slurm/serving.sbatch), or beside a server.

    0 left, or the run is finished, or none came   1 refused, or the engine fails again and again   2 bad arguments
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rose import processes
from rose.comm import singleton
from rose.comm.join import Endpoint, JoinError, endpoint
from rose.config import ConfigError
from rose.launch import resume
from rose.serving import settings
from rose.serving.member import Ended, _say

LOOK_S = 0.5
SAY_EVERY_S = 60.0
KILL_S = 15.0  # beyond serving.drain_s
FAILURES = 5  # memberships in a row that end so
LONG_S = 60.0  # a membership of this length was none of them
BACK_OFF_S = (1.0, 60.0)


class Lender:
    """One engine's share, from one membership to the next."""

    def __init__(self, run_dir: Path, overrides: list[str]) -> None:
        self.run_dir, self.overrides = run_dir, overrides
        self.signals: list[int] = []
        self.drain_s = 0.0

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, lambda got, _: self.signals.append(got))
        failures, pause = 0, BACK_OFF_S[0]
        while True:
            if (code := self._await_run()) is not None:
                return code
            config = settings.of_run(self.run_dir, self.overrides)
            self.drain_s = config.serving.drain_s
            began = time.monotonic()
            ended = self._membership()
            if self.signals:
                return 0
            if ended == Ended.REFUSED:
                return 1
            long = time.monotonic() - began > LONG_S
            failures = failures + 1 if ended not in (Ended.RUN_OVER, Ended.NOT_NOW) and not long else 0
            if failures >= FAILURES:
                _say(f"given up: {failures} memberships in a row failed")
                return 1
            pause = BACK_OFF_S[0] if long else min(2 * pause, BACK_OFF_S[1])
            self._sleep(pause)

    def _await_run(self) -> int | None:
        """Wait until the run is seen alive: None. Else the exit code."""
        seen: Endpoint | None = None
        began = said = time.monotonic()
        while not self.signals:
            try:
                found = endpoint(self.run_dir)
            except JoinError as error:
                if not error.temporary:
                    _say(str(error))
                    return 1
                found = None
            if found is not None and seen is not None and found != seen:
                return None  # its beats grow
            seen = found
            wait_s = self._wait_s()
            if self._is_finished() and found is None:
                _say(f"{self.run_dir} is finished")
                return 0
            now = time.monotonic()
            if now - began > wait_s:
                _say(f"no run to serve in {self.run_dir} for {wait_s:g} s (serving.wait_s)")
                return 0
            if now - said > SAY_EVERY_S or said == began:
                said = now + 1e-6
                _say(f"{'waiting for' if found is None else 'looking for a sign of life of'} {self.run_dir}")
            self._sleep(LOOK_S)
        return 0

    def _wait_s(self) -> float:
        try:
            return settings.of_run(self.run_dir, self.overrides).serving.wait_s
        except ConfigError:
            if (self.run_dir / "config.json").exists():
                raise
            return float(settings.parse(self.overrides).get("serving.wait_s", 3600.0))  # it has not begun yet

    def _is_finished(self) -> bool:
        try:
            return resume.is_finished(self.run_dir, settings.of_run(self.run_dir, []).trainer.steps)
        except ConfigError:
            return False

    def _membership(self) -> int:
        """Run one; pass signals on. Its exit code."""
        here = os.getpid()
        member = subprocess.Popen([sys.executable, "-m", "rose.serving.member", str(self.run_dir), *self.overrides],
                                  stdin=subprocess.DEVNULL, env=singleton.environment({}),
                                  preexec_fn=lambda: processes.die_with_parent(here))
        passed, deadline = 0, float("inf")
        while (code := member.poll()) is None:
            while passed < len(self.signals):
                number, passed = self.signals[passed], passed + 1
                member.send_signal(signal.SIGUSR2 if number == signal.SIGUSR2 else signal.SIGTERM)
                deadline = time.monotonic() + KILL_S + (self.drain_s if number == signal.SIGUSR2 else 0.0)
            if time.monotonic() > deadline:
                member.kill()
            time.sleep(0.05)
        if code < 0 and not self.signals:
            _say(f"the member was killed by {signal.Signals(-code).name}")
        return code

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.signals:
            time.sleep(0.05)


def main(arguments: list[str]) -> int:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return 0
    try:
        given = settings.parse(arguments)
        if "name" not in given:
            raise ConfigError("name is missing: which run? as python -m rose.serving name=frozenlake")
        run_dir = (Path(str(given.pop("output_dir", "outputs"))) / str(given.pop("name"))).resolve()
        overrides = [a for a in arguments if a.partition("=")[0] not in ("name", "output_dir")]
        if not run_dir.parent.is_dir():
            raise ConfigError(f"output_dir={str(run_dir.parent)!r}: no such folder here; give the one that the run's "
                              "launch.py had")
        return Lender(run_dir, overrides).run()
    except ConfigError as error:
        print(f"rose.serving: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
