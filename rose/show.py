"""Print what the policy did: a step's trajectories as a list, or one as a conversation.

    python -m rose.show outputs/NAME                     the newest step's trajectories
    python -m rose.show outputs/NAME --step 12
    python -m rose.show outputs/NAME g12.3               that trajectory, of whichever step has it
    python -m rose.show outputs/NAME g12.3 --tokens      each token: number, mask, probability, version

Reads rollouts/ (observe.save_trajectories=true), also while the run goes on; pipe it into less -R.

    0 printed   1 no such trajectory, or a damaged file   2 bad arguments
"""  # noqa: E501

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rose.files import printable
from rose.observe.trajectories import Part, Shown, Texts, read, saved_steps


def plain(text: object, style: str = "") -> Text:
    """As it is: no escape sequence or markup in it is obeyed."""
    return Text(printable(text), style=style)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rose.show",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the run's folder, as outputs/NAME")
    add("trajectory", metavar="TRAJECTORY", nargs="?", help="as the list has it; default: the list")
    add("--step", metavar="N", type=int, help="default: the newest, or the one that has TRAJECTORY")
    add("--tokens", action="store_true", help="each token on a line of its own")
    args = parser.parse_intermixed_args(arguments)
    steps = saved_steps(args.run)
    if not steps:
        parser.error(f"{args.run}: no rollouts/step-N.msgpack there; give the folder of a run")
    if args.step is not None and args.step not in steps:
        parser.error(f"--step {args.step}: {args.run} has steps {steps[0]} to {steps[-1]}")
    try:
        return show(args.run, args.trajectory, args.step, args.tokens, Console())
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


def show(run: Path, name: str | None, step: int | None, tokens: bool, console: Console) -> int:
    """Raises `ValueError` for a damaged file, or a trajectory that isn't there."""
    if name is None:
        step = saved_steps(run)[-1] if step is None else step
        console.print(listed(step, read(run, step)))
        return 0
    step, shown = find(run, name, step)
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
    return 0


def find(run: Path, name: str, step: int | None) -> tuple[int, Shown]:
    """(step, trajectory), the newest step first. Raises `ValueError` when none has it."""
    steps = saved_steps(run) if step is None else [step]
    for number in reversed(steps):
        trajectories = read(run, number)
        for shown in trajectories:
            if shown.id == name:
                return number, shown
    raise ValueError(
        f"{name!r}: no such trajectory in steps {steps[0]} to {steps[-1]}; step {steps[0]} has "
        + ", ".join(shown.id for shown in trajectories[:8])
        + (", ..." if len(trajectories) > 8 else "")
    )


def listed(step: int, trajectories: list[Shown]) -> Table:
    """Without lines between columns: 80 of a terminal's are just enough."""
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


def heading(step: int, shown: Shown) -> Panel:
    record = shown.record
    lines = [
        f"step {step}, group {record.get('group', '')}, environment {record.get('domain') or '?'}",
        f"reward {shown.reward:g}; {shown.outcome}; {record.get('turns', '?')} turns",
        f"{shown.length} tokens, of which the policy made {shown.made}",
    ]
    if record.get("stats"):
        lines.append(", ".join(f"{name} {value:g}" for name, value in record["stats"].items()))
    return Panel(plain("\n".join(lines)), title=plain(shown.id), title_align="left")


def panel(part: Part, turn: str, texts: Texts) -> Panel:
    first, last = part.start, part.start + len(part.tokens) - 1
    title = f"{'policy' if part.made else 'given'} · " + f"{turn} · " * bool(turn)
    title += f"tokens {first} to {last}"
    if part.made:
        title += f" · {part.of_versions} · mean log-probability {part.logprobs.mean():.3f}"
    style = "green" if part.made else "dim"
    text = plain(texts.of(part.tokens), style="" if part.made else "dim")
    return Panel(text, title=Text(title), title_align="left", border_style=style)


def token_table(part: Part, texts: Texts) -> Table:
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
