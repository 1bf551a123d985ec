"""Show trajectories as conversations, in a section of the report. The section has the best, worst
and longest trajectory of some steps, and one that a limit cut or that made an unreadable call. It
also has the newest trajectories that failed and were replaced. Its size is bounded, however long
the run and its trajectories are.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

from rose.files import printable
from rose.parts.report.trajectories import (
    Part,
    Shown,
    Texts,
    failed_files,
    notable,
    read,
    read_failed,
    saved_steps,
)

MAX_STEPS = 24  # steps shown, evenly spaced, with the first and the last
MAX_CHARACTERS = 4000  # characters of a trajectory: some 400 kB for `MAX_STEPS`
MAX_PARTS = 40  # parts of a trajectory
MAX_FAILED = 8  # newest trajectories that failed


def html(run_dir: Path) -> str:
    """Return the section."""
    steps, texts = saved_steps(run_dir), Texts(run_dir)
    replaced = _failed(run_dir, texts)
    if not steps:
        return (
            '<p class="empty">No trajectories were saved (observe.save_trajectories), so none can '
            f"be shown.</p>{replaced}"
        )
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(MAX_STEPS, len(steps))).round())
    body = "".join(_step(run_dir, steps[int(at)], texts) for at in chosen)
    note = f" ({escape(texts.missing)})" if texts.missing else ""
    return (
        "<p class=muted>Text that the policy generated has a coloured background. "
        f"{len(chosen)} of {len(steps)} steps; rose show RUN [TRAJECTORY] prints any of them in "
        f"full{note}.</p>{body}{replaced}"
    )


def _failed(run_dir: Path, texts: Texts) -> str:
    """Return the newest trajectories that failed, with what their programs printed; "" if none
    failed."""
    newest, damaged = read_failed(run_dir, MAX_FAILED)
    kept = len(failed_files(run_dir))
    body = "".join(f"<p class=muted>{escape(words)}</p>" for words in damaged)
    for shown in reversed(newest):
        task = shown.record.get("task")
        cause = f"{f'task {task}: ' if task else ''}{shown.record.get('cause')}"
        body += _trajectory("failed", shown, texts)
        body += f"<p>{escape(printable(cause))}</p>"
        if output := str(shown.record.get("output") or ""):
            text = escape(printable(cut(output, MAX_CHARACTERS)))
            body += f"<p class=muted>The program printed:</p><pre>{text}</pre>"
    if not body:
        return ""
    more = "; rose show RUN --failed lists the others" * (kept > len(newest))
    return (
        f"<details><summary>Failed and replaced: the newest {len(newest)} of {kept} that are "
        f"kept{more}</summary>{body}</details>"
    )


def _step(run_dir: Path, step: int, texts: Texts) -> str:
    """Return a step's notable trajectories."""
    try:
        trajectories = read(run_dir, step)
    except (OSError, ValueError) as error:
        return f"<p class=muted>Step {step}: {escape(str(error))}</p>"
    shown = "".join(_trajectory(why, each, texts) for why, each in notable(trajectories))
    rewards = [each.reward for each in trajectories]
    mean = f", mean reward {np.mean(rewards):.3f}" if rewards else ""
    return (
        f"<details><summary>Step {step}: {len(trajectories)} trajectories{mean}</summary>"
        f"{shown}</details>"
    )


def _trajectory(why: str, shown: Shown, texts: Texts) -> str:
    """Return a trajectory up to `MAX_CHARACTERS`. `why`: the reason to show it, such as "best"."""
    domain = shown.record.get("domain")
    words = (
        f"{why}: {shown.id}{f', {domain}' if domain else ''}; reward {shown.reward:g}, "
        f"{shown.outcome}; {shown.record.get('turns', '?')} turns, {shown.made} of {shown.length} "
        "tokens made"
    )
    left = MAX_CHARACTERS
    lines = []
    for number, sample in enumerate(shown.samples, 1):
        if len(shown.samples) > 1:
            lines.append(f"<p class=muted>sample {number} of {len(shown.samples)}</p>")
        for at, part in enumerate(sample.parts()):
            if left <= 0 or at == MAX_PARTS:
                lines.append("<p class=muted>The rest is left out here.</p>")
                break
            text = cut(texts.of(part.tokens), left)
            left -= len(text)
            lines.append(_part(part, shown.about(part), text))
        if left <= 0:
            break
    return f"<h3>{escape(words)}</h3><div class=talk>{''.join(lines)}</div>"


def _part(part: Part, turn: str, text: str) -> str:
    """Return a part with its title. `turn`: what `Shown.about` returns for it."""
    title = f"{turn} · " * bool(turn) + f"{len(part.tokens)} tokens"
    if part.made:
        title += f" · {part.of_versions} · mean log-probability {part.logprobs.mean():.2f}"
    kind = "made" if part.made else "given"
    return f"<div class={kind}><span class=muted>{title}</span><pre>{escape(text)}</pre></div>"


def cut(text: str, most: int) -> str:
    """Return `text`; if it has more than `most` characters, its beginning and end, with the number
    of characters left out between them."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[len(text) - half :]}"
