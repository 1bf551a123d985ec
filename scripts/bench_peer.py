"""Time whole GRPO steps of SmolLM2-135M on this machine's cores beside TRL's GRPOTrainer.

    python scripts/bench_peer.py [prompts=4] [members=8] [tokens=64] [steps=4] [rounds=2] [threads=2]

A step is `prompts` questions with `members` answers each, all of exactly `tokens` tokens, their
rewards (the share of distinct words), the update in float32, and weights from which the next step
samples. Each round is a run of `launch.py` (one engine of all `threads`, which engine and trainer
use in turns) and one of TRL, which generates with transformers, without gradient checkpointing and
all samples in one batch. The first step of each run is left out. TRL's threads spin between
operations, which is many times slower beside any other load (OMP_WAIT_POLICY=passive).

Needs requirements/test.txt. Prints seconds of a step, and processor seconds of all processes of the
run, which other load lengthens less: medians and extremes, and TRL's as multiples of ours.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose import files
from rose.models import resolve
from scripts.csv_tables import middle, show
from scripts.harness import Failed, configured, cpu_s, family, keyed, stop
from scripts.runs import Run, launch

LOOK_S = 0.1
SILENCE_S = 600.0  # seconds without a step after which a run has failed
ALIKE = 0.97  # least mean length of a step's answers, as a share of `tokens`
UNUSED = "<empty_output>"  # a token that SmolLM2 hardly ever generates
TOPICS = ("a river", "an old clock", "the night train", "bread", "a lighthouse", "two cats")


def main() -> int:
    if sys.argv[1:2] == ["--trl"]:
        return trl(json.loads(sys.argv[2]), Path(sys.argv[3]))
    sizes = {"prompts": 4, "members": 8, "tokens": 64, "steps": 4, "rounds": 2, "threads": 2}
    options = keyed(sys.argv[1:], __doc__, **sizes)
    if options["steps"] < 2:
        raise Failed(f"steps={options['steps']}: two at least, as the first is not counted")
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "TRL": []}
    for _ in range(options["rounds"]):
        for name, run in (("ours", launched), ("TRL", trl_run)):
            with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
                steps = run(options, Path(folder))
            found[name] += steps
            print(name, *(f"{s:.2f} s ({cpu:.2f} CPU)" for s, cpu in steps), flush=True)
    rows, ours = [], [median(column) for column in zip(*found["ours"], strict=True)]
    for name, steps in found.items():
        seconds, cpu_s = zip(*steps, strict=True)
        row = {"steps of": name, "s": middle(seconds), "CPU s": middle(cpu_s)}
        rows.append(row | {"of ours": median(seconds) / ours[0], "CPU": median(cpu_s) / ours[1]})
    show(rows, f"{len(found['ours'])} steps each")
    return 0


def distinct(text):
    words = text.split()
    return len(set(words)) / max(1, len(words))


def questions() -> list[dict[str, Any]]:
    ask = "Tell me a long story about {} and {}."
    pairs = itertools.permutations(TOPICS, 2)
    return [{"prompt": [{"role": "user", "content": ask.format(*pair)}]} for pair in pairs]


def launched(options: dict[str, Any], folder: Path) -> list[tuple[float, float]]:
    (folder / "reward.py").write_text(inspect.getsource(distinct), encoding="utf-8")
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, questions())), encoding="utf-8")
    rows = options["prompts"] * options["members"]
    command = launch(
        folder,
        "bench",
        "model=smollm2",
        "model.source=folder",
        f"model.path={endless(folder / 'model')}",
        *("model.max_context=512", "env=prompts", f"env.max_new_tokens={options['tokens']}"),
        f"env.args.data={folder}/data.jsonl",
        f"env.args.reward={folder}/reward.py:distinct",
        *("eval.episodes=0", "observe.terminal=false", "observe.report=false"),
        f"rollout.turn_timeout_s={SILENCE_S}",
        *("rollout.workers=1", f"rollout.threads={options['threads']}"),
        *(f"rollout.group_size={options['members']}", f"rollout.max_sequences={rows}"),
        *("rollout.kv_cache_gib=1.5", f"trainer.batch_size={rows}"),
        *(f"trainer.steps={options['steps']}", f"trainer.threads={options['threads']}"),
        *("trainer.micro_batch_tokens=4096", "trainer.checkpoint_every=1000000"),
        "trainer.optimizer.lr=1e-6",
    )
    run = Run(folder / "bench")
    found = timed(command, {}, folder, options["steps"], lambda: len(run.steps()))
    lengths = [row["response_tokens_mean"] for row in run.steps()]
    if min(lengths) < ALIKE * options["tokens"]:
        raise Failed(f"answers of {lengths} tokens in the mean, not of {options['tokens']}")
    return found


def endless(folder: Path) -> Path:
    """Create SmolLM2 with another end-of-message token, so that no answer ends by itself."""
    source = resolve(configured("model=smollm2").model)
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    from transformers import AutoTokenizer

    number = AutoTokenizer.from_pretrained(source).convert_tokens_to_ids(UNUSED)
    for name, end in (
        ("config.json", {"eos_token_id": number}),
        ("generation_config.json", {"eos_token_id": number}),
        ("tokenizer_config.json", {"eos_token": UNUSED}),
    ):
        tree = json.loads((source / name).read_text(encoding="utf-8")) | end
        files.write_whole(folder / name, json.dumps(tree).encode())
    name = "chat_template.jinja"
    template = (source / name).read_text(encoding="utf-8").replace("<|im_end|>", UNUSED)
    files.write_whole(folder / name, template.encode())
    return folder


def trl_run(options: dict[str, Any], folder: Path) -> list[tuple[float, float]]:
    steps = folder / "steps"
    steps.touch()
    command = [sys.executable, __file__, "--trl", json.dumps(options), str(folder)]
    env = {"OMP_NUM_THREADS": str(options["threads"]), "TOKENIZERS_PARALLELISM": "false"}
    return timed(command, env, folder, options["steps"], lambda: steps.stat().st_size)


def timed(
    command: list[str], env: dict[str, str], folder: Path, steps: int, done: Callable[[], int]
) -> list[tuple[float, float]]:
    """Run a command that makes `steps` training steps. Return (seconds, processor seconds of all
    its processes) of each step but the first. `done` returns the number of finished steps."""
    with open(folder / "log", "wb") as log:
        environment = os.environ | env
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    marks, last = list[tuple[float, float]](), time.monotonic()
    try:
        while len(marks) < steps:
            if process.poll() not in (None, 0) or time.monotonic() - last > SILENCE_S:
                log_end = (folder / "log").read_text(errors="replace", encoding="utf-8")[-3000:]
                raise Failed(f"{len(marks)} of {steps} steps:\n{log_end}")
            if done() > len(marks):
                last = time.monotonic()
                marks.append((last, cpu_s(*family(process.pid))))
            time.sleep(LOOK_S)
    finally:
        stop(process)
    return [(b[0] - a[0], b[1] - a[1]) for a, b in zip(marks[:-1], marks[1:], strict=True)]


def trl(options: dict[str, Any], folder: Path) -> int:
    """Run TRL in this process. It appends a byte to `folder`/steps at the end of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **_) -> None:
            with open(folder / "steps", "ab") as file:
                file.write(b".")

    torch.set_num_threads(options["threads"])
    source = str(endless(folder / "model"))
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True}
    quiet |= dict.fromkeys(("save_strategy", "logging_strategy"), "no")
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        **quiet,
        max_steps=options["steps"],
        learning_rate=1e-6,
        beta=0.0,
        num_generations=options["members"],
        per_device_train_batch_size=options["prompts"] * options["members"],
        max_completion_length=options["tokens"],
        generation_kwargs={"min_new_tokens": options["tokens"]},
        gradient_checkpointing=False,
    )
    GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
        lambda completions, **_: [distinct(c[0]["content"]) for c in completions],
        args=settings,
        train_dataset=Dataset.from_list(questions() * options["steps"] * options["prompts"]),
        processing_class=AutoTokenizer.from_pretrained(source),
        callbacks=[Steps()],
    ).train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
