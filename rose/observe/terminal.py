"""Show the run in the terminal: live while it runs, a table and a curve when it has ended.

The display reads metrics.jsonl and live.json only, so it may start late, or die and start again,
without effect on the run.
"""

from __future__ import annotations

import os
import select
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rose import extensions, places
from rose.files import printable
from rose.observe import cost, series
from rose.observe.metrics import EVENTS, MetricsReader, read_metrics, rows_of
from rose.observe.status import Status, read_status

POLL_SECONDS = 0.25
MAX_TABLE_WIDTH = 1000  # characters of a line in a file or a pipe
ETA_STEPS = 10  # newest steps, whose mean duration predicts the remaining ones
PHASE_STYLES = {"rollout": "blue", "train": "yellow", "sync": "green", "idle": "bright_black"}
# Bit of the dot at (row, column) in a braille character.
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@contextmanager
def shown(run_dir: Path, console: Console, poll_s: float | None = None) -> Iterator[None]:
    """Show the run from a thread (`follow`) while the `with` block runs."""
    over = threading.Event()
    thread = threading.Thread(
        target=follow,
        args=(run_dir, over.is_set, console, poll_s or POLL_SECONDS, over.wait),
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5.0)


def follow(
    run_dir: Path | str,
    stop: Callable[[], bool],
    console: Console,
    poll_s: float = POLL_SECONDS,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Show the run until `stop()`, called every `poll_s` seconds, returns True. A terminal gets a
    live display, and other outputs a line per new step, evaluation or fault. Rows written before
    the stop are still shown."""
    polls = _polls(stop, poll_s, pause)
    if console.is_terminal:
        _follow_live(Path(run_dir), polls, console)
    else:
        _follow_lines(Path(run_dir), polls, console)


def reader_has_left() -> bool:
    """True if standard output is a pipe whose reader has exited, as with `--help | head`. If so,
    discard all later output. False if another pipe or a connection broke."""
    if sys.stdout is None:
        return False
    watched = select.poll()
    watched.register(sys.stdout, 0)
    if not watched.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def echo(console: Console, text: str, label: str = "", style: str | None = None) -> None:
    """Print `text` as it is, with its brackets and line breaks, after `label` (rich's markup).
    Print control characters as visible symbols, so that the terminal doesn't execute them."""
    if label:
        console.print(label, end=" ")
    words = printable(text)
    console.print(words, markup=False, highlight=False, soft_wrap=True, style=style)


def plain(text: object, style: str = "") -> Text:
    """Return `text` for printing; escape sequences and markup are shown, not executed."""
    return Text(printable(text), style=style)


def show(console: Console, table: Table) -> None:
    """Print a table: as wide as the terminal, or as wide as necessary in a file or a pipe."""
    if console.is_terminal:
        console.print(table)
        return
    width = console.width
    try:
        # rich prints nothing wider than the console, so it is widened to measure the table.
        console.width = MAX_TABLE_WIDTH
        console.width = max(width, console.measure(table).maximum)
        console.print(table)
    finally:
        console.width = width


def _follow_lines(run_dir: Path, polls: Iterator[None], console: Console) -> None:
    """Print a line for each row that is written from now on."""
    metrics = MetricsReader(run_dir)
    shown = len(metrics.rows())  # rows that earlier attempts have printed
    for _ in polls:
        rows, status = metrics.rows(), read_status(run_dir) or Status()
        for at in range(min(shown, len(rows)), len(rows)):  # fewer rows after a resume
            echo(console, describe(rows[at], status.steps))
            if words := _newly_untaught(rows[: at + 1]):
                echo(console, words, label="[yellow]warning:[/]")
        shown = len(rows)


def _newly_untaught(rows: list[dict[str, Any]]) -> str:
    """Return the warning of `series.untaught` (steps without a gradient) if it is due to the last
    row and not to earlier rows; "" otherwise."""
    steps = rows_of(rows, "step")
    if not rows or rows[-1]["kind"] != "step" or series.untaught(steps[:-1]):
        return ""
    return series.untaught(steps)


def _polls(
    stop: Callable[[], bool], poll_s: float, pause: Callable[[float], object]
) -> Iterator[None]:
    """Yield every `poll_s` seconds until `stop()` returns True, and once more after that."""
    while not stop():
        yield
        pause(poll_s)
    yield


def describe(row: dict[str, Any], steps: int) -> str:
    """Return one row of the metrics as one line of text."""
    if row["kind"] in EVENTS:
        fault = "fault: " if row["kind"] == "fault" else ""
        detail = str(row.get("detail", ""))
        # The other lines are vLLM's warnings, which the report has.
        detail = detail.partition("\n")[0] if row["kind"] == "engine" else detail
        found = f"{row.get('what', '')}: {detail}"
        return f"step {row['step']}: {fault}{printable(found)}"
    if row["kind"] == "eval":
        found = series.evaluations([row])
        held_out = f"success {_rate(found[0])}" if found else "set is empty"
        passes = found[0]["passes"] if found else {}
        held_out += "".join(f", pass@{k} {rate:.1%}" for k, rate in sorted(passes.items()))
        return f"step {row['step']}: held-out {held_out}"
    parts = [
        f"{name} {form.format(row[key])}"
        for name, key, form in (
            ("success", "success", "{:.1%}"),
            ("reward", "reward_mean", "{:.3f}"),
            ("tokens/s", "tokens_per_s", "{:,.0f}"),
            ("step", "time_step", "{:.1f} s"),
            ("rollout", "time_rollout", "{:.1f} s"),
            ("train", "time_train", "{:.1f} s"),
            ("sync", "time_sync", "{:.1f} s"),
            ("idle", "time_idle", "{:.1f} s"),
            ("KL", "mismatch_kl", "{:.1e}"),
        )
        if isinstance(row.get(key), (int, float))
    ]
    return f"step {row['step']}/{steps or '?'}: " + ", ".join(parts)


def _rate(evaluation: dict[str, Any]) -> str:
    e = evaluation
    return f"{e['rate']:.1%} (95% {e['low']:.1%} to {e['high']:.1%}, {e['successes']} of {e['n']})"


def _follow_live(run_dir: Path, polls: Iterator[None], console: Console) -> None:
    metrics = MetricsReader(run_dir)
    with Live(console=console, refresh_per_second=4, transient=True, auto_refresh=False) as live:
        for _ in polls:
            status = read_status(run_dir) or Status()
            live.update(screen(run_dir.name, status, metrics.rows()), refresh=True)


def screen(name: str, status: Status, rows: list[dict[str, Any]]) -> Panel:
    """Return the live display's present content."""
    steps = rows_of(rows, "step")
    parts: list[Any] = [_progress(status, steps), _phase(status)]
    if status.workers:
        parts += [Text(), _engines(status)]
    if steps:
        last = steps[-1]
        parts += [Text(), Text(describe(last, status.steps), style="default"), _phase_bar(last)]
    values = [row["success"] for row in steps if isinstance(row.get("success"), (int, float))]
    if len(values) > 1:
        parts += [Text(), *map(Text, curve(values, 56, 4))]
    if words := series.untaught(steps):
        parts += [Text(words, style="yellow")]
    faults = [row for row in rows if row["kind"] == "fault"]
    parts += [Text(describe(row, status.steps), style="red") for row in faults[-3:]]
    title = Text(f" ROSE · {name} ", style="bold")
    look = {"title_align": "left", "border_style": "blue", "padding": (0, 1)}
    return Panel(Group(*parts), title=title, **look)


def _progress(status: Status, steps: list[dict[str, Any]]) -> Table:
    """Return a line with the step, a progress bar, the elapsed time and the estimated rest."""
    elapsed = max(0.0, time.time() - status.started) if status.started else 0.0
    per_step = series.mean_of(steps[-ETA_STEPS:], "time_step")
    done = steps[-1]["step"] if steps else 0
    left = (per_step or 0) * (status.steps - done)
    eta = f"{_clock(left)} left" if left > 0 else ""
    line = Table.grid(padding=(0, 2))
    line.add_row(
        Text(f"step {status.step}/{status.steps or '?'}", style="bold"),
        ProgressBar(total=max(1, status.steps), completed=done, width=30),
        f"{_clock(elapsed)} elapsed",
        eta,
    )
    return line


def _phase(status: Status) -> Text:
    """Return a line with the present phase, its finished trajectories and what it waits for."""
    text = Text(status.phase, style=PHASE_STYLES.get(status.phase, "magenta"))
    if status.total:
        text.append(f"  {status.finished}/{status.total} trajectories", style="default")
    if status.waiting_for:
        text.append(f"  waiting for {printable(status.waiting_for)}", style="bright_black")
    return text


def _engines(status: Status) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("engine")
    for title in ("tokens/s", "running", "waiting", "version"):
        table.add_column(title, justify="right")
    for name, w in list(status.workers.items())[:16]:
        table.add_row(
            Text(name), f"{w.tokens_per_s:,.0f}", str(w.running), str(w.waiting), str(w.version)
        )
    if len(status.workers) > 16:
        total = sum(w.tokens_per_s for w in status.workers.values())
        table.add_row(f"all {len(status.workers)}", f"{total:,.0f}", "", "", "")
    return table


def _phase_bar(row: dict[str, Any], width: int = 56) -> Text:
    """Return a bar that shows each phase's share of a step's time."""
    times = {phase: row.get(f"time_{phase}") or 0.0 for phase in PHASE_STYLES}
    total = max(row.get("time_step") or 0.0, sum(times.values())) or 1.0
    text = Text()
    for phase, seconds in times.items():
        text.append("━" * round(width * seconds / total), style=PHASE_STYLES[phase])
    return text


def _clock(seconds: float) -> str:
    """Return a duration as minutes:seconds, or as hours:minutes:seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours = f"{minutes // 60}:{minutes % 60:02}" if minutes >= 60 else f"{minutes}"
    return f"{hours}:{rest:02}"


def curve(values: Sequence[float], width: int, height: int, dots: bool = True) -> list[str]:
    """Draw rates in [0, 1] over their index as lines of text with an axis. `width` and `height` are
    in characters. Each has 2 by 4 braille dots, or is a `*` if `dots` is false."""
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    previous = None
    for x in range(columns):
        at = x * (len(values) - 1) / (columns - 1)
        low = int(at)
        value = values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])
        y = round((1 - min(1.0, max(0.0, value))) * (rows - 1))
        previous = y if previous is None else previous
        for dot in range(min(y, previous), max(y, previous) + 1):  # all dots of a steep part
            cells[dot // 4][x // 2] |= BRAILLE[dot % 4][x % 2]
        previous = y
    labels = {0: "100% ┤", height - 1: "  0% ┤"}
    lines = [
        labels.get(i, "     │") + "".join(chr(0x2800 + c) if dots else " *"[c > 0] for c in row)
        for i, row in enumerate(cells)
    ]
    return lines if dots else [line.replace("┤", "+").replace("│", "|") for line in lines]


def final_table(run_dir: Path | str, console: Console) -> None:
    """Print held-out success before and after, a curve of the training success, the report's path
    and the run's cost. Print the commands to export the model and to watch the policy play."""
    rows = read_metrics(run_dir)
    evals, steps = series.evaluations(rows_of(rows, "eval")), rows_of(rows, "step")
    if evals:
        console.print(_result(evals))
    values = [row["success"] for row in steps if isinstance(row.get("success"), (int, float))]
    if len(values) > 1:
        utf, width = "utf" in (console.encoding or "").lower(), min(60, console.width - 8)
        echo(console, "\nSuccess of the training episodes")
        for line in curve(values, width, 6, dots=utf):
            echo(console, line, style="blue" if utf else None)
        first, last = f"step {steps[0]['step']}", f"step {steps[-1]['step']}"
        echo(console, f"      {first}{last:>{max(1, width - len(first))}}")
    for part in extensions.modules("views").values():
        if (path := Path(run_dir) / part.PAGE).exists():
            echo(console, f"\nReport: {path}")
    if steps:
        run = shlex.quote(str(run_dir))
        echo(console, f"Take the model home: {places.command()} export {run} --out my-model")
    show_cost(run_dir, console)
    if steps and "play" in extensions.merged("commands", "COMMANDS"):
        echo(console, f"Watch it play: {places.command()} play {run} --before")


def show_cost(run_dir: Path | str, console: Console) -> bool:
    """Print the run's cost so far in one line. Return False if the cost is unknown."""
    attempts, damaged = cost.of_attempts(run_dir)
    for one in damaged:
        echo(console, f"Cost unknown: {one}")
    spent = cost.total(attempts.values())
    if spent is not None:
        echo(console, f"Cost: {spent.text()}")
    return spent is not None


def _result(evals: list[dict[str, Any]]) -> Table:
    """Return a table of held-out success in the first and the last evaluation."""
    table = Table(title="Held-out tasks", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("success", "95% interval", "solved"):
        table.add_column(name, justify="right")
    a, b = evals[0], evals[-1]
    for label, e in (("before", a), ("after", b))[: len(evals)]:
        interval = f"{e['low']:.1%} to {e['high']:.1%}"
        solved = f"{e['successes']} of {e['n']}"
        table.add_row(f"{label} (step {e['step']})", f"{e['rate']:.1%}", interval, solved)
    if len(evals) > 1:
        low, high = series.gain_interval(a, b)
        gain = f"{100 * (b['rate'] - a['rate']):+.1f} pp"
        interval = f"{100 * low:+.1f} to {100 * high:+.1f} pp"
        table.add_row("difference", gain, interval, "", style="bold")
    return table
