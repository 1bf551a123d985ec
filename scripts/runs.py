"""Runs of launch.py: their command, and what their folders show. Not a command."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose.launch import rank_status
from rose.observe.metrics import read_metrics, rows_of
from rose.protocol import Role

REPOSITORY = Path(__file__).resolve().parents[1]
DEADLINE_S, POLL_S = 900.0, 0.05
# A run that is measured has no evaluation and no reports, and its engines and trainers one thread.
MEASURED = (
    *("eval.episodes=0", "observe.terminal=false", "observe.report=false"),
    *("observe.tensorboard=false", "rollout.threads=1", "trainer.threads=1"),
)


def launch(folder: Path | str, name: str, *overrides: str) -> list[str]:
    """Return the command that starts the run FOLDER/NAME."""
    command = [sys.executable, str(REPOSITORY / "launch.py")]
    return [*command, f"output_dir={folder}", f"name={name}", *overrides]


def ran(folder: Path | str, name: str, *overrides: str, **popen: Any) -> Run:
    """Run launch.py to its end, without evaluation and report."""
    command = launch(folder, name, "eval.episodes=0", "observe.report=false", *overrides)
    subprocess.run(command, check=True, timeout=DEADLINE_S, **popen)
    return Run(Path(folder) / name)


class Run:
    """A run's folder. A subclass that starts the run says in `over` whether it has ended."""

    # The longest wait of `until` in seconds, and the error that it raises.
    deadline_s = DEADLINE_S
    error: type[BaseException] = SystemExit

    def __init__(self, run: Path) -> None:
        self.run = run

    @property
    def over(self) -> bool | str:
        """True, or the reason, once the run has ended."""
        return False

    def live(self) -> dict:
        """Return the status that the run shows its users, {} while there is none."""
        path = self.run / "live.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def phase(self) -> tuple[str, int]:
        """Return the phase that the run is in, empty while there is none, and its step."""
        live = self.live()
        return live.get("phase", ""), live.get("step", 0)

    def steps(self, skip: int = 0) -> list[dict]:
        """Return the steps of metrics.jsonl after the first `skip`."""
        return rows_of(read_metrics(self.run), "step")[skip:]

    def ranks(self, role: Role) -> list[rank_status.RankStatus]:
        """Return the running ranks of the newest attempt."""
        attempts = sorted((self.run / "status").glob("attempt-*"))
        if not attempts:
            return []
        with contextlib.suppress(ValueError, OSError):  # status file that is being written
            found = rank_status.read_all(self.run, int(attempts[-1].name.rpartition("-")[2]))
            return [s for s in found.values() if s.role is role and s.state == "running"]
        return []

    def until(
        self, condition: Callable[[], Any], what: str, deadline_s: float | None = None
    ) -> Any:
        """Poll until `condition` holds and return its value. Raises `error` with the ends of the
        run's logs if the run ends first, or after `deadline_s`."""
        deadline_s = deadline_s or self.deadline_s
        end = time.monotonic() + deadline_s
        while not (value := condition()):
            if (over := self.over) or time.monotonic() > end:
                why = f"the run ended: {over}" if over else f"not within {deadline_s:g} s"
                raise self.error(f"{self.run}: {what} did not come; {why}\n{self.logs()}")
            time.sleep(POLL_S)
        return value

    def logs(self) -> str:
        """Return the last 25 lines of each log of the newest attempt."""
        return "\n".join(
            f"--- {p.name}\n"
            + "\n".join(p.read_text(errors="replace", encoding="utf-8").splitlines()[-25:])
            for p in sorted((self.run / "logs" / "latest").glob("*.log"))
        )
