"""Print a step's trajectories as a list, or one trajectory as a conversation.

    rose show outputs/NAME                     the newest step's trajectories
    rose show outputs/NAME --step 12
    rose show outputs/NAME g12.3               that trajectory, of whichever step has it
    rose show outputs/NAME g12.3 --tokens      each token: number, mask, probability, version
    rose show outputs/NAME --failed            those that failed and were replaced, and why
    rose show outputs/NAME --failed g12.4      one of them, with what its program printed

Reads rollouts/ and failed/ (observe.save_trajectories=true), also while the run goes on; pipe it
into less -R.

    0 printed   1 no such trajectory, or a damaged file   2 bad arguments
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rose.observe import failed
from rose.observe.terminal import plain
from rose.parts.report.trajectories import Part, Shown, Texts, read, read_failed, saved_steps

MOST_CAUSE = 200  # characters of a cause in the list


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rose show", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the run's folder, as outputs/NAME")
    add("trajectory", metavar="TRAJECTORY", nargs="?", help="as the list has it; default: the list")
    add("--step", metavar="N", type=int, help="default: the newest, or the one that has TRAJECTORY")
    add("--tokens", action="store_true", help="each token on a line of its own")
    add("--failed", action="store_true", help="trajectories that failed and were replaced")
    args = parser.parse_intermixed_args(arguments)
    steps, any_failed = saved_steps(args.run), (args.run / failed.FOLDER).is_dir()
    if not steps and not any_failed:
        parser.error(f"{args.run}: no rollouts/step-N.msgpack there; give the folder of a run")
    if args.failed and not any_failed:
        parser.error(f"--failed: no trajectory of {args.run} has failed")
    if args.failed and args.step is not None:
        parser.error("--failed: a trajectory that failed belongs to no step")
    if args.step is not None and args.step not in steps:
        parser.error(f"--step {args.step}: {args.run} has {_steps(steps)}")
    try:
        lost = args.failed or not steps
        if lost and args.trajectory is None:
            return list_failed(args.run, Console())
        return show(args.run, args.trajectory, args.step, args.tokens, Console(), lost)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


def _steps(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "no step yet"


def list_failed(run: Path, console: Console) -> int:
    """List the saved trajectories that failed, and name files that can't be read."""
    found, damaged = read_failed(run)
    for problem in damaged:
        print(problem, file=sys.stderr)
    table = Table(title=f"{len(found)} failed and replaced, the newest last", title_justify="left")
    for column in ("trajectory", "environment", "task", "turns", "made", "cause"):
        table.add_column(column)
    for shown in found:
        names = (shown.record.get(key) or "" for key in ("id", "domain", "task"))
        counts = str(shown.record.get("turns", 0)), str(shown.made)
        cause = shown.record["cause"].partition("\n")[0]
        table.add_row(*map(plain, names), *counts, plain(cause[:MOST_CAUSE]))
    console.print(table)
    return 1 if damaged else 0


def show(
    run: Path,
    name: str | None,
    step: int | None,
    tokens: bool,
    console: Console,
    lost: bool = False,
) -> int:
    """Print a step's trajectories, or the trajectory `name`. If `lost`, it is one that failed.
    Raises `ValueError` for a damaged file, or if there is no such trajectory."""
    if name is None:
        step = saved_steps(run)[-1] if step is None else step
        console.print(listed(step, read(run, step)))
        return 0
    step, shown = (None, find_failed(run, name)) if lost else find(run, name, step)
    texts = Texts(run)
    if texts.missing:
        print(texts.missing, file=sys.stderr)
    console.print(heading(step, shown))
    for number, sample in enumerate(shown.samples, 1):
        if len(shown.samples) > 1:
            console.rule(f"sample {number} of {len(shown.samples)}")
        for part in sample.parts():
            turn = shown.about(part)
            console.print(token_table(part, texts) if tokens else panel(part, turn, texts))
    if output := shown.record.get("output"):
        console.print(Panel(plain(output), title="the program printed", title_align="left"))
    return 0


def find(run: Path, name: str, step: int | None) -> tuple[int | None, Shown]:
    """Return (step, trajectory `name`) of the newest step that has it. If no step has it, search
    failed trajectories, and return None as the step. Raises `ValueError` if it isn't found."""
    steps = saved_steps(run) if step is None else [step]
    for number in reversed(steps):
        trajectories = read(run, number)
        for shown in trajectories:
            if shown.id == name:
                return number, shown
    if step is None:
        with suppress(ValueError):
            return None, find_failed(run, name)
    raise ValueError(
        f"{name!r}: no such trajectory in steps {steps[0]} to {steps[-1]}; step {steps[0]} has "
        + ", ".join(shown.id for shown in trajectories[:8])
        + (", ..." if len(trajectories) > 8 else "")
    )


def find_failed(run: Path, name: str) -> Shown:
    """Return the newest failed trajectory of this name. Raises `ValueError` if there is none."""
    found, damaged = read_failed(run)
    for shown in reversed(found):
        if shown.id == name:
            return shown
    raise ValueError("; ".join([f"{name!r}: no such trajectory failed", *damaged]))


def listed(step: int, trajectories: list[Shown]) -> Table:
    """Return a step's trajectories as a table. It has no lines between columns, so that it fits 80
    characters."""
    title = f"Step {step}: {len(trajectories)} trajectories"
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True
    )
    for column in ("trajectory", "environment"):
        table.add_column(column, min_width=len(column))
    for column in ("reward", "turns", "samples", "tokens", "made", "versions"):
        table.add_column(column, justify="right", min_width=len(column))
    table.add_column("outcome")
    for shown in trajectories:
        made = [v for s in shown.samples for v in s.versions[s.mask == 1]]
        versions = sorted({min(made), max(made)}) if made else []
        table.add_row(
            plain(shown.id),
            plain(shown.record.get("domain") or ""),
            f"{shown.reward:g}",
            plain(shown.record.get("turns", "")),
            str(len(shown.samples)),
            str(shown.length),
            str(shown.made),
            " to ".join(map(str, versions)),
            shown.outcome,
        )
    return table


def heading(step: int | None, shown: Shown) -> Panel:
    """Return the panel above a conversation. `step` is None for a trajectory that failed."""
    record = shown.record
    where = "" if step is None else f"step {step}, "
    lines = [
        f"{where}group {record.get('group', '')}, environment {record.get('domain') or '?'}",
        f"reward {shown.reward:g}; {shown.outcome}; {record.get('turns', '?')} turns",
        f"{shown.length} tokens, of which the policy made {shown.made}",
    ]
    if record.get("stats"):
        lines.append(", ".join(f"{name} {value:g}" for name, value in record["stats"].items()))
    if cause := record.get("cause"):
        lines.append(f"task {record['task']}: {cause}" if record.get("task") else cause)
    return Panel(plain("\n".join(lines)), title=plain(shown.id), title_align="left")


def panel(part: Part, turn: str, texts: Texts) -> Panel:
    """Return a part of a conversation. `turn`: what `Shown.about` returns for it."""
    first, last = part.start, part.start + len(part.tokens) - 1
    title = f"{'policy' if part.made else 'given'} · " + f"{turn} · " * bool(turn)
    title += f"tokens {first} to {last}"
    if part.made:
        title += f" · {part.of_versions} · mean log-probability {part.logprobs.mean():.3f}"
    style = "green" if part.made else "dim"
    text = plain(texts.of(part.tokens), style="" if part.made else "dim")
    return Panel(text, title=Text(title), title_align="left", border_style=style)


def token_table(part: Part, texts: Texts) -> Table:
    """Return a part of a conversation with a row for each token."""
    table = Table(box=None, pad_edge=False, show_header=part.start == 0)
    for column in ("position", "token", "mask", "version", "log-probability"):
        table.add_column(column, justify="right", min_width=len(column))
    table.add_column("text")
    for at, token in enumerate(part.tokens):
        table.add_row(
            str(part.start + at),
            str(token),
            str(int(part.made)),
            str(part.versions[at]) if part.made else "",
            f"{part.logprobs[at]:.4f}" if part.made else "",
            plain(repr(texts.of([token]))[1:-1], style="green" if part.made else "dim"),
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
