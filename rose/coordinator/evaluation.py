"""Held-out evaluations: which tasks, when, and their results once all trajectories have finished.

The step loop waits for an evaluation or, with eval.beside, continues. The scheduler gives training
turns precedence and prefers borrowed engines for evaluation turns. Running evaluation turns
continue with new weights when these arrive; the evaluation's row reports by how many versions. One
evaluation runs beside training at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rose.config import Config
from rose.coordinator import control
from rose.coordinator.groups import Rollouts
from rose.coordinator.step_metrics import evaluation
from rose.observe import held_out
from rose.observe.metrics import read_metrics, rows_of


class Evaluations:
    """Starts evaluations and writes their rows. `write` takes (step, row of metrics.jsonl),
    `on_fault` (what, detail) of evaluations that are skipped or lost."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        rollouts: Rollouts,
        write: Callable[[int, dict[str, Any]], None],
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._config, self._rollouts = config, rollouts
        self._write, self._on_fault = write, on_fault
        self._running: dict[int, list[str]] = {}  # step -> names of its groups
        self._rows = rows_of(read_metrics(run_dir), "eval")

    @property
    def running(self) -> list[int]:
        """Return the steps whose evaluations run."""
        return list(self._running)

    def lost(self, steps: list[int]) -> None:
        """Report evaluations that ran beside training when the run was interrupted. They can't be
        repeated, because the weights of these `steps` no longer exist."""
        for step in sorted(set(steps) - {row["step"] for row in self._rows}):
            self._on_fault(
                "evaluation lost",
                f"step {step}: it ran beside training when the run ended; its checkpoint stays no "
                "longer than others",
            )
            self._rollouts.forget_groups(f"e{step}-")

    def due(self, step: int, last: int) -> bool:
        """True if an evaluation is due after `step` and neither runs nor has a row, which an
        earlier attempt may have written."""
        return (
            self._config.rollout.replay is None
            and self._config.eval.due(step, last)
            and step not in self._running
            and step not in [row["step"] for row in self._rows]
        )

    def begin(self, step: int, beside: bool) -> None:
        """Start the evaluation of `step`. If it is to run beside training and another evaluation
        still runs, skip it and report a fault."""
        if beside and self._running:
            [before] = self._running
            self._on_fault(
                "evaluation left out",
                f"step {step}: that of step {before} still runs; a larger eval.every, or fewer "
                "tasks",
            )
            return
        tasks = self.tasks(step)
        self._running[step] = list(tasks)
        self._rollouts.evaluate(tasks, waited_for=not beside)

    def tasks(self, step: int) -> dict[str, tuple[control.Task, int]]:
        """Return name of the group -> (its task, number of samples) of the evaluation."""
        e, weights = self._config.eval, self._config.env.weights
        own = [control.eval_task(e.seed, index, weights) for index in range(e.episodes)]
        found = {f"e{step}-{index}": (task, e.samples) for index, task in enumerate(own)}
        for name, one in e.sets.items():
            for index in range(one.episodes):
                task = control.eval_task(e.seed, index, {name: 1.0})
                found[f"e{step}-{name}-{index}"] = (task, e.of(name)[0])
        return found

    async def run(
        self, step: int, last: int, wait: Callable[[Callable[[], bool]], Awaitable[None]]
    ) -> None:
        """Start the evaluation that is due, if any, and `wait` until none runs. With eval.beside,
        wait only for those before the first and after the `last` step."""
        ends = step >= last
        beside = self._config.eval.beside and step > 0 and not ends
        self.collect()
        if due := self.due(step, last):
            self.begin(step, beside)
        if not (self.collect() or beside) and (due or ends):
            await wait(self.collect)

    def collect(self) -> bool:
        """Write the rows of finished evaluations; return True if none runs any more."""
        for step, names in list(self._running.items()):
            finished = self._rollouts.finished
            if all(name in finished for name in names):
                del self._running[step]
                groups = [finished.pop(name) for name in names]
                row = {"step": step, **evaluation(groups, self._config, step)}
                self._rows.append(row)
                self._write(step, row)
        return not self._running

    def stop_reason(self) -> str:
        """Return why eval.stop ends the run before its last step; "" if it does not."""
        stop = self._config.eval.stop
        if not stop.patience:
            return ""
        count = held_out.without_gain(self._rows, stop.min_gain)
        if count < stop.patience:
            return ""
        return (
            f"{count} evaluations without a better held-out reward "
            f"(eval.stop.patience={stop.patience}, min_gain={stop.min_gain:g})"
        )

    def kept(self) -> set[int]:
        """Return the steps whose checkpoints stay, however old: the step with the best evaluation,
        and steps whose evaluations still run."""
        if not self._config.eval.keep_best:
            return set()
        best = held_out.best(self._rows)
        return {*self._running, *([best["step"]] if best else [])}
