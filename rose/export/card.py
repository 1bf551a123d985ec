"""Write the model card of an exported folder: its origin, its held-out results, and the commands
that use it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rose.config import Config
from rose.export import serve
from rose.observe import series
from rose.observe.metrics import read_metrics, rows_of


class Exported(NamedTuple):
    """Facts about an exported folder."""

    out: Path
    step: int
    where: str  # source of the weights, in words
    shards: int
    blocks: int  # number of blocks compared
    nbytes: int  # bytes of the weights
    base: Path  # folder of the model that the run began with
    adapter: bool = False  # True: the adapter without the model


def text(config: Config, run_dir: Path, done: Exported) -> str:
    """Return the text of README.md, with the hub's header."""
    rows = [row for row in read_metrics(run_dir) if row["step"] <= done.step]
    sections = (
        f"# {config.name}, step {done.step}\n\n{base_of(config)} trained by reinforcement learning "
        f"({config.algorithm.name}) on {' + '.join(config.env.members)} with ROSE.",
        "## Results\n\n" + _results(rows),
        "## Made of\n\n" + _markdown_table(_facts(config, run_dir, done), ("", "")),
        f"## Use\n\n```sh\n{_use(config, done)}\n```",
        f"## Trained by\n\n```sh\n{_command(run_dir)}\n```\n\n"
        "The run's folder has its whole configuration in `config.yaml`.",
    )
    return (
        f"---\n{yaml.safe_dump(_hub_header(config, done.adapter), sort_keys=False)}---\n"
        + "\n\n".join((*sections, ""))
    )


def base_of(config: Config) -> str:
    """Return a description of the model that the run began with, by which a reader can find it."""
    model = config.model
    if model.source == "hub":
        commit = Path(model.snapshot).name[:12] if model.snapshot else model.revision
        return f"{model.path} (commit {commit})"
    return model.path if model.source == "folder" else f"{model.name} (recipe {model.source})"


def _command(run_dir: Path) -> str:
    """Return the command that started the run, from the launcher's record."""
    path = run_dir / "command.txt"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else "python launch.py"


def _use(config: Config, done: Exported) -> str:
    """Return the commands that serve the policy, and the command that trains it on."""
    served = serve.commands(config, done.base, done.out, done.adapter)
    if done.adapter:
        on = "# PEFT: PeftModel.from_pretrained(base, folder); to train on, export it with --merge"
    else:
        path = shlex.quote(str(done.out))
        on = f"python launch.py model.source=folder model.path={path} name=NAME   # train on"
    return f"{served}\n{on}"


def _hub_header(config: Config, adapter: bool = False) -> dict[str, Any]:
    base = {"base_model": config.model.path} if config.model.source == "hub" else {}
    return base | {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "agent", "rose", config.algorithm.name],
    }


def _results(rows: list[dict[str, Any]]) -> str:
    """Return a table of held-out success at the first and the last evaluation up to the step."""
    found = series.evaluations(rows_of(rows, "eval"))
    if not found:
        return "No held-out evaluation had finished by this step."
    chosen = [found[0], found[-1]] if len(found) > 1 else found
    return _markdown_table(
        [
            (
                f"step {e['step']}",
                f"{e['rate']:.1%}",
                f"{e['low']:.1%} to {e['high']:.1%}",
                f"{e['successes']} of {e['n']}",
                "" if e["reward"] is None else f"{e['reward']:.3f}",
            )
            for e in chosen
        ],
        ("held-out tasks", "success", "95% interval", "solved", "mean reward"),
    )


def _facts(config: Config, run_dir: Path, done: Exported) -> list[tuple[str, str]]:
    """Return the rows of the table "Made of"."""
    arguments, rollout = config.model.chat_template_args, config.rollout
    command = ["python", "-m", "rose.export", str(run_dir)]
    command += ["--step", str(done.step), "--out", str(done.out)]
    return [
        ("run", str(run_dir.resolve())),
        ("step", str(done.step)),
        ("base model", base_of(config)),
        ("weights from", done.where),
        ("dtype", config.model.dtype),
        *_lora_row(config),
        (
            "checked",
            f"the xxh3-128 of all {done.blocks} blocks are those of what the engines had at this "
            "step",
        ),
        ("longest context in training", f"{config.model.max_context} tokens"),
        ("sampled at", f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}"),
        *([("chat template arguments", str(arguments))] if arguments else []),
        ("export", shlex.join(command)),
    ]


def _lora_row(config: Config) -> list[tuple[str, str]]:
    lora = config.trainer.lora
    if lora is None:
        return []
    return [("LoRA", f"rank {lora.rank}, alpha {lora.alpha:g}, beside {', '.join(lora.targets)}")]


def _markdown_table(rows: list[tuple], titles: tuple[str, ...]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)


def _cell(value: str) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
