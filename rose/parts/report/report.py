"""Write `<run_dir>/report.html`, the run in one file. Text, tables and configuration are written
here as HTML; the scripts in page/ draw the figures."""

from __future__ import annotations

import json
import time
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rose import extensions
from rose.files import printable, write_whole
from rose.observe import cost, series
from rose.observe.metrics import read_metrics, rows_of
from rose.observe.status import read_failure
from rose.parts.report import conversations, curves, events, members, shell, tasks
from rose.parts.report.shell import figure, figures, section, table
from rose.parts.report.timeline import build_timeline

FILE = "report.html"
MAX_TABLE_ROWS = 200  # rows of the table of steps, which thins longer runs
# (key of a row of metrics.jsonl, column's title, format) of the table of steps.
COLUMNS = (
    ("step", "Step", "{:.0f}"),
    ("success", "Success", "{:.1%}"),
    ("reward_mean", "Reward", "{:.3f}"),
    ("response_tokens_mean", "Response tokens", "{:.1f}"),
    ("tokens_per_s", "Tokens/s", "{:,.0f}"),
    ("time_step", "Step, s", "{:.2f}"),
    ("time_rollout", "Rollout, s", "{:.2f}"),
    ("time_train", "Train, s", "{:.2f}"),
    ("time_sync", "Sync, s", "{:.2f}"),
    ("loss", "Loss", "{:.4g}"),
    ("mismatch_kl", "Mismatch KL, nats", "{:.2e}"),
    ("grad_norm", "Gradient norm", "{:.3g}"),
    ("entropy", "Entropy, nats", "{:.3f}"),
    ("clip_fraction", "Clipped tokens", "{:.2%}"),
    ("staleness_mean", "Staleness", "{:.2f}"),
    ("lr", "Learning rate", "{:.2e}"),
)


def build_report(run_dir: Path | str) -> Path:
    """Write the report of all that the run has so far, even nothing, and return its path."""
    run_dir = Path(run_dir)
    rows = read_metrics(run_dir)
    steps, faults = rows_of(rows, "step"), [row for row in rows if row["kind"] == "fault"]
    lost = "borrowed rank lost"
    borrowed = [row for row in rows if row["kind"] == "worker" or row.get("what") == lost]
    of_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("engine", "host")}
    evals = series.evaluations(rows_of(rows, "eval"))
    config, timeline = _config(run_dir), build_timeline(run_dir)
    data = {
        "curves": curves.curves(steps),
        "engines": curves.curves_by(steps, "tokens_per_s"),
        "members": curves.curves_by(steps, "success"),
        "phases": curves.phase_bars(steps),
        "evals": evals,
        "lengths": curves.length_histogram(steps),
        "rewards": curves.value_histogram(steps, "reward_values"),
        "turns": curves.value_histogram(steps, "turn_values"),
        "timeline": timeline,
    }
    times = (
        figure("phases")
        + _hidden(steps)
        + _hybrid(steps)
        + figure("timeline")
        + figure("throughput")
    )
    of_parts = (part.html(run_dir) for part in extensions.modules("run_report").values())
    sections = {
        **_failed(run_dir),
        "Result": _result(evals) + members.html(rows_of(rows, "eval"), steps),
        "Learning": figures("success", "reward", "rewards"),
        **_tasks(steps, rows_of(rows, "eval")),
        "Where the time goes": times + _drafts(steps),
        **_cost(run_dir),
        "Responses": figures("lengths", "tokens", "turns", "turnshares", "unusable"),
        "Trajectories": conversations.html(run_dir),
        "Optimisation": figures(*_optimisation(steps)),
        **_rewards(steps),
        "Borrowed ranks": events.borrowed(borrowed, steps) + "".join(of_parts),
        "Faults": events.faults(faults, steps),
        **events.own_reports("Engines", "Engine", of_kind["engine"]),
        **events.own_reports("Environment hosts", "Host", of_kind["host"]),
        "Details": _details(steps, config),
    }
    body = "\n\n".join(section(title, content) for title, content in sections.items())
    own = files("rose.parts.report") / "page"
    scripts = [(own / name).read_text(encoding="utf-8") for name in ("figures.js", "timeline.js")]
    name, facts = run_dir.resolve().name, _facts(steps, timeline)
    html = shell.page("training", name, _subtitle(config, rows), facts, body, data, scripts)
    path = run_dir / FILE
    write_whole(path, html.encode())
    return path


def _failed(run_dir: Path) -> dict[str, str]:
    """Return the first section of a run whose last attempt failed; {} otherwise."""
    cause = printable(read_failure(run_dir))
    return {"This run failed": f"<pre>{escape(cause)}</pre>"} if cause else {}


def _tasks(steps: list[dict[str, Any]], evals: list[dict[str, Any]]) -> dict[str, str]:
    """Return a section about single tasks if the environment names them; {} otherwise."""
    listed = tasks.html(steps, evals)
    return {"Tasks": listed} if listed else {}


def _rewards(steps: list[dict[str, Any]]) -> dict[str, str]:
    """Return a section about the scoring of episodes if a pool of workers did it; {} otherwise."""
    scored = [row for row in steps if "reward_wait_s_mean" in row]
    if not scored:
        return {}
    rollout_s = sum((row.get("time_rollout") or 0) + (row.get("time_idle") or 0) for row in scored)
    waited_s = sum(row["time_reward_wait"] for row in scored)
    counted = (
        ("from the end of an episode to its score", "reward_wait_s_mean"),
        ("of it waiting for a worker", "reward_queue_s_mean"),
        ("of it computing", "reward_score_s_mean"),
    )
    means = "; ".join(f"{name} {series.mean_of(scored, key) or 0:.3g} s" for name, key in counted)
    failed = sum(row["reward_failures"] for row in scored)
    late = sum(row["reward_timeouts"] for row in scored)
    jobs = max(row.get("reward_jobs") or 0 for row in scored)
    by_jobs = series.mean_of(scored, "reward_by_jobs") or 0
    joined = f" Slurm jobs, {jobs} at most, computed {by_jobs:.1%} of them." if by_jobs else ""
    return {
        "Rewards": f"<p>On average {means}. Only scores were missing for "
        f"{waited_s / max(rollout_s, 1e-9):.1%} of the rollouts' time. Episodes without a score, "
        f"which were replaced: {failed:,}. Answers that used their time up: {late:,}.{joined}</p>"
    }


def _hidden(steps: list[dict[str, Any]]) -> str:
    """Return a line about the trainer's work before batches are complete; "" without
    trainer.stream."""
    hidden = series.mean_of(steps, "stream_hidden")
    if hidden is None:
        return ""
    return (
        f"<p>{hidden:.0%} of the trainer's time on a step was before its batch was complete "
        "(trainer.stream).</p>"
    )


def _hybrid(steps: list[dict[str, Any]]) -> str:
    """Return a line about engines on the trainer's devices; "" without rollout.hybrid."""
    used = series.mean_of(steps, "hybrid_idle_used")
    if used is None:
        return ""
    tokens, delay = (series.mean_of(steps, f"hybrid_{key}") for key in ("token_share", "delay"))
    given = _duration(_sum(steps, "device_seconds_hybrid"))
    late = int(_sum(steps, "starts_broken_off"))
    return (
        f"<p>Engines on the trainer's devices (rollout.hybrid) had turns for {used:.0%} of the "
        f"time in which these had nothing to train ({given} of devices), and generated "
        f"{tokens:.0%} of the tokens. The trainer waited for its devices for {delay:.1%} of a "
        f"step. Starts of such engines that were cancelled for it: {late}.</p>"
    )


def _sum(steps: list[dict[str, Any]], key: str) -> float:
    return sum(row.get(key) or 0 for row in steps)


def _optimisation(steps: list[dict[str, Any]]) -> list[str]:
    """Return the names of the figures of "Optimisation"; `reference` only if the run has a
    reference model."""
    reference = ["reference"] if any("reference_kl" in row for row in steps) else []
    names = ["mismatch", "ratio", "clipped", "staleness", "entropy", "grad", "lr", "equal"]
    return [*names, *reference]


def _config(run_dir: Path) -> dict[str, Any]:
    """Return the run's configuration; {} if its file is absent or damaged."""
    try:
        found = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _subtitle(config: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    names = [(config.get(part) or {}).get("name") for part in ("model", "env", "algorithm")]
    if mixed := (config.get("env") or {}).get("members"):
        names[1] = " + ".join(mixed)
    words = [str(name) for name in names if name]
    if rows:
        words.append(time.strftime("%-d %B %Y, %H:%M", time.localtime(rows[0]["time"])))
    return " · ".join(escape(word) for word in words)


def _facts(steps: list[dict[str, Any]], timeline: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the few numbers to know first, as (name, value)."""
    tokens, busy = series.mean_of(steps, "tokens_per_s"), series.mean_of(steps, "time_step")
    engines = sum(row["role"] == "rollout" for row in timeline["rows"]) if timeline else 0
    return [
        ("Steps", f"{len(steps):,}"),
        ("Time in steps", _duration(sum(row.get("time_step") or 0.0 for row in steps))),
        ("Per step", "–" if busy is None else f"{busy:.1f} s"),
        ("Throughput", "–" if tokens is None else f"{tokens:,.0f} tokens/s"),
        ("Engines", f"{engines}" if engines else "–"),
    ]


def _duration(seconds: float) -> str:
    hours, minutes = int(seconds // 3600), int(seconds % 3600 // 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{seconds:.1f} s"


def _result(evals: list[dict[str, Any]]) -> str:
    """Return a table of held-out success, with intervals: before and after training, and at the
    best step in between."""
    if not evals:
        return '<p class="empty">No held-out evaluation has finished yet.</p>'
    chosen = {"Before training": evals[0]} | ({"After training": evals[-1]} if evals[1:] else {})
    best = max(evals[1:-1], key=lambda e: (e["reward"] or 0.0, not e["later"]), default=None)
    if best and (best["reward"] or 0.0) > (evals[-1]["reward"] or 0.0):
        chosen["Best"] = best
    most = [max(e["passes"]) for e in chosen.values() if e["passes"]]  # samples of a task
    rows = [
        [
            f"{label} <span class=muted>(step {e['step']}{_later(e['later'])})</span>",
            f"{e['rate']:.1%}",
            f"{e['low']:.1%} to {e['high']:.1%}",
            f"{e['successes']} of {e['n']}",
            _number(e["reward"], "{:.3f}"),
            *([_number(e["passes"].get(max(most)), "{:.1%}")] if most else []),
        ]
        for label, e in chosen.items()
    ]
    if evals[1:]:
        a, b = evals[0], evals[-1]
        low, high = series.gain_interval(a, b)
        gain, *interval = map(_percentage_points, (b["rate"] - a["rate"], low, high))
        cells = ("Difference", gain, " to ".join(interval))
        rows.append([*(f"<b>{cell}</b>" for cell in cells), "", "", *[""][: len(most)]])
    titles = ["Held-out tasks", "Success", "95% interval", "Solved", "Mean reward"]
    return table(titles + ([f"pass@{max(most)}"] if most else []), rows)


def _later(versions: int) -> str:
    """Return a note on an evaluation whose weights were newer than its step; "" for 0 versions."""
    return f", weights up to {versions} versions newer" if versions else ""


def _cost(run_dir: Path) -> dict[str, str]:
    """Return a section about the run's cost; {} if it is unknown."""
    attempts, damaged = cost.of_attempts(run_dir)
    unknown = "".join(f"<p class=empty>Unknown: {escape(one)}</p>" for one in damaged)
    if not attempts:
        return {"Cost": unknown} if unknown else {}
    listed = {f"Attempt {number}": one for number, one in attempts.items()}
    if len(attempts) > 1:
        listed["Together"] = cost.total(attempts.values())
    rows = [
        [
            label,
            *(f"{hours:,.3g}" for hours in one.device_hours),
            *(f"{tokens:,}" for tokens in (one.made, one.made_borrowed, one.trained)),
            _number(one.kwh, "{:,.3g}"),
        ]
        for label, one in listed.items()
    ]
    titles = ("", "Device-hours dedicated", "borrowed", "Tokens made", "by borrowed engines")
    return {"Cost": table((*titles, "trained", "Energy, kWh"), rows) + unknown}


def _percentage_points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−") + " pp"


def _number(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, (int, float)) else "–"


def _drafts(steps: list[dict[str, Any]]) -> str:
    """Return a line about speculative decoding; "" if the run has none."""
    drafted, accepted = (
        sum(row.get(f"{what}_tokens") or 0 for row in steps) for what in ("drafted", "accepted")
    )
    if not drafted:
        return ""
    each = _number(series.mean_of(steps, "tokens_per_engine_step"), "{:.2f}")
    share = accepted / drafted
    return (
        f"<p>Drafts (rollout/draft): {drafted:,} tokens, {share:.0%} of them accepted; {each} "
        "tokens in a step of an engine.</p>"
    )


def _details(steps: list[dict[str, Any]], config: dict[str, Any]) -> str:
    tree = escape(json.dumps(config, indent=2, ensure_ascii=False))
    tree = tree if config else "No config.json in the folder."
    return (
        f"<details><summary>Numbers of every step</summary>{_step_table(steps)}</details>\n"
        f"<details><summary>Resolved configuration</summary><pre>{tree}</pre></details>"
    )


def _step_table(steps: list[dict[str, Any]]) -> str:
    """Return the figures' numbers as a table; evenly thinned in long runs."""
    stride = max(1, -(-len(steps) // MAX_TABLE_ROWS))
    cells = [[_number(row.get(key), form) for key, _, form in COLUMNS] for row in steps[::stride]]
    note = f"<p class=muted>Every {stride}th step; metrics.jsonl has all.</p>" if stride > 1 else ""
    return table([title for _, title, _ in COLUMNS], cells) + note
