"""Serving jobs on a real Slurm lend their ranks to a training job: they come, go, are killed and
preempted."""

import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from rose.launch import state
from rose.models import resolve
from rose.observe.metrics import read_metrics, rows_of
from rose.observe.status import read_status
from rose.parts.lending import device_profile, run_report, settings
from rose.parts.lending.rules.predictor import Predictor
from rose.parts.report.report import build_report
from tests.slurm.conftest import REPOSITORY, SlurmJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
sys.path.insert(0, str(REPOSITORY / "tests" / "soak"))
import storm

from tests.processes import ran


class Serving:
    """A serving job; ended with the test."""

    def __init__(self, lending, *options, arguments=()):
        self.lending = lending
        self.log = lending.folder / f"serving-{time.monotonic_ns()}.log"
        command = ["sbatch", "--parsable", f"--output={self.log}", *options]
        command += [str(REPOSITORY / "slurm" / "serving.sbatch"), "name=run"]
        command += [f"output_dir={lending.folder}", "rollout.threads=1", *arguments]
        done = ran(command, cwd=REPOSITORY, timeout=120)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip().split(";")[0]

    def workers(self):
        """Names that its ranks have borne, in the order in which they joined."""
        found = (
            re.findall(r"(borrowed-\d+): joined", self.log.read_text()) if self.log.exists() else []
        )
        return list(dict.fromkeys(found))

    def joined(self, count=1):
        return self.lending.until(
            lambda: self.workers() if len(self.workers()) >= count else None,
            f"{count} ranks of job {self.id} to join\n{self.words()}",
        )

    def saying(self, pattern):
        """The match of what it has said, once it has."""
        return self.lending.until(
            lambda: self.log.exists() and re.search(pattern, self.log.read_text()),
            f"{pattern} of job {self.id}\n{self.words()}",
        )

    def words(self):
        return self.log.read_text()[-3000:] if self.log.exists() else ""

    def cancel(self):
        subprocess.run(["scancel", self.id], check=True, timeout=120)


@pytest.fixture(scope="module")
def lending(cluster, tmp_path_factory):
    """A training job that goes on, whenever a test has it work, until the module's end; then what
    must hold of any run is checked."""
    job = SlurmJob(tmp_path_factory.mktemp("lending"))
    job.submit_paused(
        "trainer.steps=100000",
        "trainer.checkpoint_every=20",
        "transfer.keep_versions=4",
        "serving.lost_after_s=20",  # silence of a busy machine is no loss
    )
    try:
        with job.works():
            job.until(lambda: job.steps(), "the first step")
        yield job
        with job.works():
            newest = job.steps()[-1]
            job.until(lambda: job.steps()[-1] >= newest + 2, "the training to go on")
    finally:
        subprocess.run(["scancel", job.id], check=True, timeout=120)
        job.until(lambda: not state.is_active(job.id), "its end")
    assert storm.check(job.run) == []


@pytest.fixture
def serve(lending):
    jobs = []

    def start(*options, **arguments):
        jobs.append(Serving(lending, *options, **arguments))
        return jobs[-1]

    yield start
    for job in jobs:
        if state.is_active(job.id):
            job.cancel()
    for job in jobs:
        lending.until(lambda: not state.is_active(job.id), "scancel")


def happened(lending, what, worker):
    return [
        row
        for row in read_metrics(lending.run)
        if row.get("what") == what and row["detail"].startswith(f"{worker}:")
    ]


def gone(lending, worker):
    return happened(lending, "left", worker) + happened(lending, "borrowed rank lost", worker)


def lends(lending, worker):
    """Has the run work until a step after now has tokens of it."""
    after = lending.steps()[-1]
    with lending.works():
        lending.until(
            lambda: any(
                row["step"] > after and row.get(f"tokens_per_s/{worker}", 0) > 0
                for row in rows_of(read_metrics(lending.run), "step")
            ),
            f"tokens of {worker}",
        )


def test_ranks_are_cancelled_and_preempted_and_come_back_with_the_right_weights(lending, serve):
    whole_node = ("--nodelist=n4", "--cpus-per-task=8")
    other = serve("--partition=spare", *whole_node)
    # heterogeneous
    two_kinds = serve("--partition=spare", "--ntasks=1", ":", "--partition=serve", "--ntasks=1")
    [third] = other.joined()
    first, second = two_kinds.joined(2)
    lends(lending, third)
    two_kinds.cancel()
    lending.until(lambda: gone(lending, first) and gone(lending, second), "the cancelled ranks")

    command = ["sbatch", "--parsable", "--partition=serve", *whole_node, "--output=/dev/null"]
    command += ["--wrap=true"]
    urgent = ran(command, timeout=120, check=True).stdout.strip()
    lending.until(lambda: gone(lending, third), "the preempted rank to be gone")
    lending.until(lambda: not state.is_active(urgent), "the urgent job")
    again = other.joined(2)[-1]  # by itself
    lends(lending, again)
    newest = lending.steps()[-1]
    assert newest > 1

    def follows() -> bool:
        status = read_status(lending.run)
        worker = status.workers.get(again) if status else None
        return worker is not None and worker.version >= newest - 1

    lending.until(follows, f"{again} to have the weights of step {newest - 1}")


def profiled(lending, *arguments):
    """A profile of this machine with step times that are made up: what is measured with it is
    tested elsewhere."""
    config = settings.of_run(lending.run, list(arguments))
    folder = resolve(config.model)
    found = device_profile.fingerprint(config, folder)
    predictor = Predictor((0.005, 1e-5, 0.0, 1e-4, 0.0)).to_dict()
    for side in ("online", "rollout"):
        found[side] |= {"model": str(folder), "predictor": predictor}
    found["interference"] |= {"hold_p99": 0.1, "hold_mean": 0.1}
    path = lending.folder / "profile.json"
    path.write_text(json.dumps({"format": device_profile.FORMAT, "seconds": 60.0} | found))
    return path


def complete(url, model):
    """One online request, answered within two minutes."""
    body = json.dumps(
        {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 8, "ignore_eos": True}
    ).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 8


def switch(page, token_file, what):
    """Over HTTP, as an operator does from anywhere in the cluster."""
    request = urllib.request.Request(
        f"{page}/lending/{what}",
        b"",
        {"Authorization": f"Bearer {Path(token_file).read_text().strip()}"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


def test_an_online_server_lends_what_it_leaves_idle_until_told_to_stop(lending, serve):
    model = resolve(settings.of_run(lending.run, []).model)
    given = [
        f"serving.online.model={model}",
        "serving.online.port=0",
        "serving.online.max_context=512",
        "serving.online.dtype=float32",
        "serving.online.kv_cache_gib=0.25",
        "serving.online.max_sequences=8",
        "serving.online.slo={ttft_p50_s: 5, ttft_p99_s: 10, tpot_p50_s: 1, tpot_p99_s: 2}",
    ]
    file = profiled(lending, "rollout.threads=1", *given)
    job = serve("--partition=spare", arguments=[*given, f"serving.lending.profile={file}"])
    [worker] = job.joined()
    url = job.saying(r"(http://\S+) serves")[1]
    for _ in range(10):
        complete(url, str(model))
    lends(lending, worker)
    for _ in range(10):
        complete(url, str(model))
    with urllib.request.urlopen(f"{url}/metrics", timeout=120) as answer:
        metrics = answer.read().decode()
    assert "vllm:time_to_first_token_seconds" in metrics
    assert float(re.search(r'rose_lent_tokens_total\{kind="made"\} (\S+)', metrics)[1]) > 0

    page, token = job.saying(r"POST (\S+)/lending/stop \(token: (\S+?)\)").groups()
    switch(page, token, "stop")
    job.saying("lending stopped by HTTP")
    switch(page, token, "start")
    lends(lending, worker)

    subprocess.run(["scancel", "--signal=USR1", job.id], check=True, timeout=120)
    job.saying("lending stopped by SIGUSR1")
    complete(url, str(model))  # it serves on

    def finished() -> float:
        return sum(
            told["attained"][kind][1]
            for _, told in run_report.read(lending.run)
            for kind in ("with", "without")
        )

    # told every 15 s, and once more at its end, if a busy machine lets it before Slurm kills it
    lending.until(lambda: finished() == 21, "a report of all requests")
    subprocess.run(["scancel", job.id], check=True, timeout=120)
    lending.until(lambda: not state.is_active(job.id), "its end")
    [(folder, told)] = run_report.read(lending.run)
    assert (
        finished() == 21
        and told["made_tokens"] > 0
        and (folder / "report.html").stat().st_size > 10_000
    )
    assert "What serving kept" in build_report(lending.run).read_text()


def test_a_rank_that_is_killed_at_a_random_moment_is_missed_and_its_command_joins_again(lending):
    """A short one of tests/soak/storm.py, whose numbers have the first kill strike a rank 3.5 s
    after it has joined, and not its command; what must hold of the run afterwards is
    checked at the module's end."""

    def ended():
        return "" if state.is_active(lending.id) else lending.logs()

    one = storm.Storm(lending.run, joins=2, lenders=1, chance=random.Random(0), ended=ended)
    with lending.works():
        assert one.rage() == []
    assert len(one.joined) == len(one.killed) == 2 and one.early == 0
    lending.until(
        lambda: storm.noticed(lending.run).keys() >= one.killed.keys(), "each kill to be noticed"
    )
    assert storm.losses(lending.run, one.killed) == []
    for worker in one.killed:
        [lost] = happened(lending, "borrowed rank lost", worker)
        assert re.search("serving.lost_after_s|connection", lost["detail"])
    assert len(list(lending.folder.glob("lender-*.log"))) == 1  # a command's
