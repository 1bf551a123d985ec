"""Send the run's numbers to Weights & Biases and MLflow too, if they are configured (observe.wandb,
observe.mlflow) and installed.

Each tracker has a thread of its own, which takes rows from a queue. So a slow or unreachable server
costs the run nothing, and only the first failure is reported. A resumed run continues the tracker's
own run, whose id is in trackers.json. Files and media are not sent. Both packages read keys and
passwords from their own variables and files (WANDB_API_KEY, MLFLOW_TRACKING_TOKEN).
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rose.config import Config, ConfigError, Observe, to_dict
from rose.files import write_whole

FILE = "trackers.json"  # tracker's name -> id of its run
WAITING_ROWS = 10_000  # most rows that wait for a tracker; further ones are not sent to it
CLOSE_SHARE = 1 / 3  # share of cluster.stop_timeout_s for sending waiting rows at the run's end
# Variables by which the packages send no reports to their makers.
QUIET = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
LONGEST_PARAMETER = 500  # most characters of a value that every MLflow server accepts
PARAMETERS_AT_ONCE = 100  # parameters in a request; MLflow's limit

_ids_lock = threading.Lock()  # guards FILE, to which each tracker's thread adds its id


class Tracker(Protocol):
    """A service that takes rows. It is created, used and closed in one thread. An error that it
    raises is reported and doesn't end the run."""

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class WandbTracker:
    """Send rows to Weights & Biases. `step` is a metric of its own: W&B's built-in step must not
    decrease, and a resumed run repeats steps."""

    def __init__(self, config: Config, run_dir: Path):
        import wandb

        wanted = config.observe.wandb
        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=wanted.project,
            entity=wanted.entity,
            mode=wanted.mode,
            group=wanted.group,
            tags=wanted.tags,
            name=config.name,
            id=run_id(run_dir, "wandb", lambda: uuid.uuid4().hex[:8]),
            resume="allow",
            dir=str(run_dir),
            config=to_dict(config),
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
        # W&B's own process writes an offline run's last rows after `finish`. Wait for its end,
        # since it may be killed with this rank.
        self._teardown()


class MlflowTracker:
    """Send rows to MLflow. The configuration becomes the parameters of MLflow's run."""

    def __init__(self, config: Config, run_dir: Path):
        # MLflow 3 accepts a folder of runs only with this variable.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        wanted = config.observe.mlflow
        self._metric, self._client = Metric, MlflowClient(tracking_uri=wanted.uri)
        self.id = run_id(run_dir, "mlflow", lambda: self._new(wanted.experiment, config.name))
        self._client.update_run(self.id, status="RUNNING")
        params = [
            Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in _flat(to_dict(config))
        ]
        known = self._client.get_run(self.id).data.params  # unchangeable in MLflow
        new = [param for param in params if param.key not in known]
        for at in range(0, len(new), PARAMETERS_AT_ONCE):
            self._client.log_batch(self.id, params=new[at : at + PARAMETERS_AT_ONCE])

    def _new(self, experiment: str, name: str) -> str:
        """Create a run in MLflow, and return its id."""
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        return self._client.create_run(number, run_name=name).info.run_id

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        metrics = [
            self._metric(_metric_name(name), value, int(1000 * time_s), step)
            for name, value in values.items()
        ]
        self._client.log_batch(self.id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.id)


def _metric_name(name: str) -> str:
    """Return the name with one "/". In a folder of runs, train/x can't be a file and a folder."""
    first, slash, rest = re.sub(r"[^\w./ -]", "_", name).partition("/")
    return first + slash + rest.replace("/", ".")


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """List the leaves of nested dictionaries as (dotted name, value)."""
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [
        leaf
        for name, branch in tree.items()
        for leaf in _flat(branch, f"{prefix}.{name}" if prefix else name)
    ]


KINDS: dict[str, tuple[str, Callable[[Config, Path], Tracker]]] = {
    "wandb": ("project", WandbTracker),
    "mlflow": ("uri", MlflowTracker),
}  # name of the package and of its section -> (the key that turns it on, its writer)


def asked_for(observe: Observe) -> list[str]:
    """List the names of the trackers that the configuration switches on."""
    return [name for name, (key, _) in KINDS.items() if getattr(getattr(observe, name), key)]


def check(observe: Observe) -> None:
    """Raise `ConfigError` for a tracker that isn't installed."""
    for name in asked_for(observe):
        spec = importlib.util.find_spec(name)
        # W&B writes a folder wandb/, which Python finds as a package without an origin.
        if spec is None or spec.origin is None:
            key, value = KINDS[name][0], getattr(getattr(observe, name), KINDS[name][0])
            raise ConfigError(
                f"observe.{name}.{key}={value!r}: the package {name} is not installed; pip install "
                f"'rose-rl[{name}]', or observe.{name}.{key}=null"
            )


def run_id(run_dir: Path, name: str, new: Callable[[], str]) -> str:
    """Return the id of the tracker's run: from `FILE` if this run was resumed, else a new one."""
    path = Path(run_dir) / FILE
    if (known := _ids(path).get(name)) is not None:
        return known
    made = new()  # outside of the lock, as it may wait for a server
    with _ids_lock:
        write_whole(path, json.dumps(_ids(path) | {name: made}).encode() + b"\n")
    return made


def _ids(path: Path) -> dict[str, str]:
    return json.loads(path.read_bytes()) if path.exists() else {}


class Background:
    """A tracker behind a queue. `faults` are errors that have not been reported yet."""

    def __init__(self, name: str, make: Callable[[], Tracker], close_s: float):
        self.name, self._close_s = name, close_s
        self.faults: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._rows: queue.Queue[tuple | None] = queue.Queue(WAITING_ROWS)
        self._lost = False
        self._thread = threading.Thread(target=self._run, args=(make,), name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Queue a row. Never waits."""
        try:
            self._rows.put_nowait((step, time_s, dict(values)))
        except queue.Full:
            self._report(f"it takes no rows: {WAITING_ROWS} are waiting")

    def close(self) -> None:
        """Give the tracker `close_s` seconds for the rows that wait."""
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self._report(f"it has not taken all rows {self._close_s:g} s after the run's end")

    def _run(self, make: Callable[[], Tracker]) -> None:
        """Create the tracker and pass it the rows, in the thread."""
        # A tracker may raise anything, SystemExit included.
        try:
            tracker = make()
        except BaseException as error:
            self._report(f"it did not start: {type(error).__name__}: {error}")
            return
        while (row := self._rows.get()) is not None:
            try:
                tracker.write(*row)
            except BaseException as error:
                self._report(
                    f"rows are missing from step {row[0]} on: {type(error).__name__}: {error}"
                )
        try:
            tracker.close()
        except BaseException as error:
            self._report(f"it did not end in order: {type(error).__name__}: {error}")

    def _report(self, what: str) -> None:
        """Report the first fault only, since an unreachable server fails in the same way for each
        row."""
        if not self._lost:
            self._lost = True
            self.faults.put(f"{self.name}: {what}"[:1000])


def start(config: Config, run_dir: Path) -> list[Background]:
    """Start the trackers that the run asks for."""
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    return [
        Background(
            name,
            lambda make=KINDS[name][1]: make(config, Path(run_dir)),
            CLOSE_SHARE * config.cluster.stop_timeout_s,
        )
        for name in asked_for(config.observe)
    ]
