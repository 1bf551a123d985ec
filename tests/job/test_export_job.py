"""The policy taken out of a real run: transformers loads it, vLLM serves it, another run starts
from it, and its log-probabilities are those that the run's engine recorded."""

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import printed
import pytest
import torch

from rose import protocol as p
from rose.coordinator import replay
from rose.export import __main__ as command
from rose.export.weights import steps, stores
from rose.transfer.receive import materialise
from tests import processes
from tests.job.job import DEADLINE_S, Job
from tests.parts.play import commands
from tests.processes import ran
from tests.transfer.worlds import same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    made = Job(
        tmp_path_factory.mktemp("export"),
        "trainer.ranks=2",
        "trainer.export_every=1",
        "trainer.export_keep=2",
        "trainer.checkpoint_every=2",
        "cluster.stop_timeout_s=180",  # of which trackers get a third
        "observe.wandb.project=lakes",
        "observe.wandb.mode=offline",
        "observe.mlflow.uri=" + (tmp_path_factory.mktemp("mlflow")).as_uri(),
    )
    assert made.wait() == 0, made.said + made.logs()
    return made


def exported(job, *arguments) -> SimpleNamespace:
    """What `python -m rose.export RUN ARGUMENTS` does and says, in this process, which has imported
    what it needs. (The run's own exports are that command.)"""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command.main([str(job.run), *map(str, arguments)])
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


@contextlib.contextmanager
def without_store(job):
    """Meanwhile the run has no weight store, so that its checkpoints are read."""
    weights, away = job.run / "weights", job.run / "weights.away"
    weights.rename(away)
    try:
        yield
    finally:
        away.rename(weights)


def agrees(job, model: torch.nn.Module, version: int, atol: float) -> None:
    """The model computes the log-probabilities that the engine recorded of tokens that it made with
    weights of this version."""
    compared = 0
    for trajectory in (t for group in replay.load(job.run, version + 1) for t in group):
        tokens = torch.tensor(p.unpack_tokens(trajectory.tokens).astype(np.int64))[None]
        made = (np.frombuffer(trajectory.versions, "<i4") == version)[1:]
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[0].log_softmax(-1)
        found = logits[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
        recorded = p.unpack_floats(trajectory.logprobs)[1:]
        np.testing.assert_allclose(found[made], recorded[made], atol=atol)
        compared += int(made.sum())
    assert compared > 100


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_a_run_writes_folders_beside_its_steps_and_keeps_the_newest(job):
    assert [f["what"] for f in job.faults() if f["what"] != "export left out"] == []
    left = sorted(path.name for path in (job.run / "exports").iterdir())
    assert "step_3" in left and 1 <= len(left) <= 2, "the last step's is there when the run ends"
    (store,) = stores(job.run)
    assert same(loaded(job.run / "exports" / "step_3"), materialise(store, 3))
    assert f"rose export {job.run} --out my-model" in job.said.replace("\n", "")
    card = (job.run / "exports" / "step_3" / "README.md").read_text()
    assert "python launch.py output_dir=" in card and "trainer.export_every=1" in card
    assert job.orphans() == []


def test_trackers_got_every_step(job, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # else MLflow 3 reads no folder
    from mlflow.tracking import MlflowClient

    config = json.loads((job.run / "config.json").read_text())
    client = MlflowClient(tracking_uri=config["observe"]["mlflow"]["uri"])
    ids = json.loads((job.run / "trackers.json").read_text())
    history = client.get_metric_history(ids["mlflow"], "train/loss")
    assert [(m.step, m.value) for m in history] == [(r["step"], r["loss"]) for r in job.steps()]
    (offline,) = (job.run / "wandb").glob(f"offline-run-*-{ids['wandb']}")
    assert list(offline.glob("*.wandb"))


def test_store_and_checkpoint_give_the_same_bits(job, tmp_path):
    there = steps(job.run)
    assert any(3 in found for found in there.values())
    from_store = exported(job, "--step", 2, "--out", tmp_path / "store")
    assert from_store.returncode == 0 and "from the weight store" in from_store.stdout, from_store
    with without_store(job):
        from_checkpoint = exported(job, "--step", 2, "--out", tmp_path / "checkpoint")
    assert from_checkpoint.returncode == 0, from_checkpoint
    assert "from the checkpoint" in from_checkpoint.stdout, from_checkpoint
    assert same(loaded(tmp_path / "store"), loaded(tmp_path / "checkpoint"))


def test_transformers_computes_the_log_probabilities_that_the_engine_recorded(job, tmp_path):
    """Those of the third step's trajectories, which the second version made."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert exported(job, "--step", 2, "--out", tmp_path / "two").returncode == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert model.dtype == torch.float32, "that of model.dtype"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "two")
    assert "turn" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "turn"}], tokenize=False, add_generation_prompt=True
    )
    agrees(job, model, 2, atol=2e-4)


def test_the_readmes_command_serves_the_calls_that_an_unchanged_agent_makes(job, tmp_path):
    """The agent is that of docs/agents.md, which a gateway would train."""
    folder = job.run / "exports" / "step_3"
    # bound here until the server has ended, as it sets SO_REUSEADDR, too: nobody else gets the port
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    readme = (folder / "README.md").read_text()
    served, *_ = readme.partition("## Use\n\n```sh\n")[2].splitlines()
    served = served.replace("python", f"exec {sys.executable}", 1)
    command = ["sh", "-c", f"{served} --host 127.0.0.1 --port {port} --max-num-seqs 4"]
    log = job.run.parent / "served.log"
    with log.open("wb") as words:
        server = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                ask(port, "/v1/models")
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
                time.sleep(0.25)
        assert {each["id"] for each in ask(port, "/v1/models")["data"]} == {"policy", job.run.name}
        printed.write("agents.md", tmp_path)
        play = "import lake_agent; print(lake_agent.play({'seed': 1}))"
        own = {"OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": "none"}
        said = ran(
            [sys.executable, "-c", play], env=os.environ | own, cwd=tmp_path, timeout=DEADLINE_S
        )
        assert said.stdout.strip() in ("0.0", "1.0"), said.stderr
        assert "dtype torch.float32 into parameter" not in log.read_text(), "it was rounded"
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(60)
        reserved.close()


def ask(port: int, path: str, body: dict | None = None) -> dict:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.load(answer)


def test_another_run_starts_from_the_folder(job, tmp_path):
    folder = job.run / "exports" / "step_3"
    more = Job(tmp_path, "model.source=folder", f"model.path={folder}", "trainer.steps=1")
    assert more.wait() == 0, more.said + more.logs()
    (store,) = stores(more.run)
    assert same(materialise(store, 0), loaded(folder)), "its first version is the other's last"
    assert [row["step"] for row in more.steps()] == [1]


def test_the_run_plays_before_and_after_and_the_export_plays_as_the_run(job, tmp_path):
    """Greedily, so that the same weights play the same game."""
    there = sorted(path for path in job.run.rglob("*"))
    greedy = ("--task", 3, "--temperature", 0)
    both = commands.play(job.run, "--before", *greedy, temporary=tmp_path / "tmp")
    assert both.returncode == 0 and both.stderr == "", both
    before, after = re.split(r"^.*frozen_lake, held-out task 3, .*$", both.stdout, flags=re.M)[1:]
    assert "frozen_lake, held-out task 3, before training" in both.stdout
    assert "frozen_lake, held-out task 3, after 3 training steps" in both.stdout
    one = r"(success|failure) after \d+ turns?"
    assert re.search(
        f"^Held-out task 3: before training {one}; after 3 training steps {one}", after, re.M
    )
    folder = job.run / "exports" / "step_3"
    alone = commands.play(folder, "env=frozen_lake", *greedy, temporary=tmp_path / "tmp")
    assert alone.returncode == 0 and alone.stderr == "", alone
    assert commands.frames(alone.stdout) == commands.frames(after)
    assert commands.frames(before)[0].split()[:4] == commands.frames(after)[0].split()[:4]
    assert list((tmp_path / "tmp").iterdir()) == [], "no socket or log stays"
    assert sorted(path for path in job.run.rglob("*")) == there, "the run is only read"


def test_ctrl_c_at_the_terminal_ends_the_engine_and_leaves_nothing(job, tmp_path):
    with without_store(job):
        terminal = commands.Terminal(job.run, "--version", 2, temporary=tmp_path / "tmp")
        terminal.until("Enter plays the next task, q ends: ")
    assert "after 2 training steps" in terminal.shown
    family = processes.children(terminal.process.pid, recursive=True)
    assert any(processes.words(each)[:1] == ["VLLM::EngineCore"] for each in family)
    terminal.type("\n")
    terminal.until("Enter plays the next task, q ends: \r\n")
    terminal.type("\x03")
    assert terminal.end() == 130, terminal.shown
    assert processes.left(lambda: [each for each in family if processes.alive(each)]) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert "Traceback" not in terminal.shown
