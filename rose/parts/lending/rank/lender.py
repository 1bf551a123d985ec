"""The lender: waits for a run, serves it as a borrowed rank, and waits for it again.

A *membership* is the time from joining a run to leaving it, in a process of its own
(rose/parts/lending/rank/member.py). The command is in rose/parts/lending/serve.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rose import processes
from rose.comm.join import Endpoint, JoinError, endpoint
from rose.config import ConfigError
from rose.engine import plugin, start
from rose.launch import caches, gpus, resume
from rose.parts.lending import settings
from rose.parts.lending.config import Config
from rose.parts.lending.rank import member
from rose.parts.lending.rank.member import Ended, log

POLL_S = 0.5  # seconds between two checks whether the run lives
WANTED_POLL_S = 10.0  # seconds between two calls of `wanted`, which may ask Slurm
LOG_EVERY_S = 60.0  # seconds between two log lines while waiting
# Seconds after a signal, beyond serving.drain_s, until a membership that hasn't left is killed.
KILL_S = 15.0
FAILURES = 5  # memberships in a row that fail before they join, after which the lender ends
BACK_OFF_S = (1.0, 60.0)  # least and most seconds between two memberships


class Lender:
    """Lends one engine to the run in `run_dir`. `overrides` are for the run's configuration.
    `wanted` returns True if an absent run is worth waiting for."""

    def __init__(
        self, run_dir: Path, overrides: list[str], wanted: Callable[[], bool] = lambda: True
    ) -> None:
        self.run_dir, self.overrides, self.wanted = run_dir, overrides, wanted
        self.command = (
            "-m",
            "rose",
            "serve",
            f"name={run_dir.name}",
            f"output_dir={run_dir.parent}",
            *overrides,
        )
        self.environ = dict(os.environ)  # environment of this process at its start
        self.signals: list[int] = []
        self.drain_s = 0.0
        self.prepared: dict[str, str] | None = None  # variables set when vLLM was imported

    def run(self) -> int:
        """Serve the run until a signal, its end or its refusal; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, lambda got, _: self.signals.append(got))
        failures, pause = 0, BACK_OFF_S[0]
        while True:
            if (code := self._await_run()) is not None:
                return code
            config = settings.of_run(self.run_dir, self.overrides)
            self.drain_s = config.serving.drain_s
            self._prepare(config)
            ended, joined = self._membership()
            if self.signals:
                return 0
            if ended == Ended.REFUSED:
                return 1
            failures = (
                failures + 1 if ended not in (Ended.RUN_OVER, Ended.NOT_NOW) and not joined else 0
            )
            if failures >= FAILURES:
                log(f"given up: {failures} memberships in a row failed")
                return 1
            pause = BACK_OFF_S[0] if joined else min(2 * pause, BACK_OFF_S[1])
            self._sleep(pause)

    def _await_run(self) -> int | None:
        """Wait until the run lives, and return None. Return an exit code if the lender must end."""
        seen: Endpoint | None = None
        began = logged = asked = time.monotonic()
        while not self.signals:
            if why := self._takes_none():
                log(why)
                return 1
            try:
                found = endpoint(self.run_dir)
            except JoinError as error:
                if not error.temporary:
                    log(str(error))
                    return 1
                found = None
            if found is not None and seen is not None and found != seen:
                return None  # The endpoint has changed since the last poll, so the run lives.
            seen = found
            wait_s = self._wait_s()
            if self._is_finished() and found is None:
                log(f"{self.run_dir} is finished")
                return 0
            now = time.monotonic()
            if now - asked > WANTED_POLL_S:
                asked = now
                if not self.wanted():
                    log(f"no job will continue {self.run_dir} now")
                    return 0
            if now - began > wait_s:
                log(f"no run to serve in {self.run_dir} for {wait_s:g} s (serving.wait_s)")
                return 0
            if now - logged > LOG_EVERY_S or logged == began:
                logged = now + 1e-6
                log(
                    f"{'waiting for' if found is None else 'looking for a sign of life of'} "
                    f"{self.run_dir}"
                )
            self._sleep(POLL_S)
        return 0

    def _takes_none(self) -> str:
        """Return why the run takes no borrowed ranks; "" if it does, or hasn't begun."""
        if not (self.run_dir / "config.json").exists():
            return ""
        config = settings.of_run(self.run_dir, self.overrides)
        reason = (
            config.why_not_borrowed or "serving.borrow=false, deterministic=true or rollout.replay"
        )
        return "" if config.borrows else f"{self.run_dir} takes no borrowed ranks: {reason}"

    def _wait_s(self) -> float:
        """Return serving.wait_s: from the run, or before it has begun from the command line."""
        try:
            return settings.of_run(self.run_dir, self.overrides).serving.wait_s
        except ConfigError:
            if (self.run_dir / "config.json").exists():
                raise
            return float(settings.parse(self.overrides).get("serving.wait_s", 3600.0))

    def _is_finished(self) -> bool:
        try:
            return resume.is_finished(self.run_dir, settings.of_run(self.run_dir, []))
        except ConfigError:
            return False

    def _prepare(self, config: Config) -> None:
        """Import vLLM, once for all memberships, which are forked from this process. The import
        takes most of a start's time. It reads environment variables, and the run determines their
        values. If these differ from the values at the import, this process executes itself again.
        Raises `ConfigError` when this task sees too few GPUs."""
        threads = 1 if config.deterministic else config.rollout.threads
        shares = plugin.FOLDER in os.environ
        wanted = start.environment(config.cluster.gpus > 0, threads, shares) | config.cluster.env
        if config.cluster.gpus:
            count = config.rollout.tensor_parallel
            # On a shared device the operator has already chosen this task's GPUs.
            given = self.environ | {"SLURM_LOCALID": "0"} if shares else self.environ
            wanted |= gpus.of_task(count, f"rollout.tensor_parallel={count}", given)
            wanted |= caches.variables(config.cluster, self.environ)
        if self.prepared is None:
            os.environ.update(wanted)
            log("importing vLLM")
            start.preload()
        elif self.prepared != wanted:
            os.execve(sys.executable, [sys.executable, "-u", *self.command], self.environ)
        self.prepared = wanted

    def _membership(self) -> tuple[int, bool]:
        """Run a membership, and pass signals on to it. Return (exit code, True if it joined the
        run). The exit code is negative if a signal killed it."""
        here = os.getpid()
        reader, writer = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            processes.die_with_parent(here)
            os.close(reader)
            member.main(self.run_dir, self.overrides, lambda: os.write(writer, b"."))
        os.close(writer)
        passed, deadline = 0, float("inf")
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            while passed < len(self.signals):
                number, passed = self.signals[passed], passed + 1
                os.kill(child, signal.SIGUSR2 if number == signal.SIGUSR2 else signal.SIGTERM)
                deadline = (
                    time.monotonic() + KILL_S + (self.drain_s if number == signal.SIGUSR2 else 0.0)
                )
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(ended[1])
        if code < 0 and not self.signals:
            log(f"the membership was killed by {processes.signal_name(-code)}")
        with open(reader, "rb") as pipe:
            return code, bool(pipe.read(1))

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.signals:
            time.sleep(0.05)
