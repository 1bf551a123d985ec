"""Check that ranks can join a run, and that the run survives when one is killed: a rank joins as
serving ranks do and is killed, then a second one joins.

The events of the coordinator's side (rose/parts/doctor/host.py) decide whether the check has
passed. If not, the cause is the first of these: an error of a porter (which accepts a joining
rank), a fault of the coordinator's side, or the last line of the joining side (joiner.py).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from rose import config as configuration
from rose.config import Config
from rose.launch import container
from rose.launch import local as launcher
from rose.parts.doctor.finding import END_S, Child, Ended, Finding, srun, task

PART = "join and survive a killed peer"
QUEUE_S = 15  # seconds that each job may wait; plain jobs start as soon as there is room
OPEN_S = 60.0  # seconds for the coordinator's side to start
JOIN_S = 150.0  # seconds for two ranks to join and one to be found lost, on busy nodes
# Least seconds of silence after which a rank counts as lost. Other checks keep the cores busy, and
# a slow rank must not count as lost.
LOST_AFTER_S = 5.0
REMEDY = "another cluster/mpi= may (mpich_wheel was tried); cluster.mpi.join=false borrows no ranks"
# (event, number of the borrowed rank, failure if the event is missing), in order.
STAGES = (
    ("joined", 1, "no rank could join"),
    ("received", 1, "a rank joined, and no message of it arrived"),
    ("joined", 2, "after one was killed, no other rank could join"),
    ("received", 2, "after one was killed, no message of the next arrived"),
    ("lost", 1, "that a rank was killed went unnoticed"),
    ("left", 2, "the next rank could not leave"),
)


def local(c: Config, folder: Path | None) -> Finding:
    """Run both sides on this machine."""
    return _join(c, folder, [*launcher.MPIEXEC, "-n", "1"], lambda _: [()])


def over_nodes(c: Config, folder: Path | None) -> Finding:
    """Run each side as a job of its own, on two nodes if two are free."""
    host = [*srun(*c.cluster.mpi.srun, queue_s=QUEUE_S), *task(c, c.cluster.slurm.trainer)]
    joiner = [
        *srun("--mpi=none", "--kill-on-bad-exit=0", queue_s=QUEUE_S),
        *task(c, c.cluster.slurm.borrowed),
    ]
    return _join(c, folder, host, lambda node: [[*joiner, f"--exclude={node}"], joiner])


def _join(
    c: Config,
    folder: Path | None,
    host: Sequence[str],
    joiners: Callable[[str], Sequence[Sequence[str]]],
) -> Finding:
    """Start both sides and return the finding. `host`: the command that starts the coordinator's
    side. `joiners` maps the coordinator's node to commands for the joining side, which are tried in
    order until one starts."""
    if not c.cluster.mpi.join:
        text = f"not tried: cluster.mpi.join=false (of {c.cluster.mpi.name})"
        remedy = "Idle serving GPUs can't help: a run uses its dedicated rollout ranks only"
        return Finding("warning", PART, text, remedy)
    if folder is None:
        return Finding("warning", PART, "not tried: it needs a folder for the run's files")
    python = (*container.command(c, [folder]), "-u", "-m")
    with tempfile.TemporaryDirectory(
        prefix=".doctor-", dir=folder, ignore_cleanup_errors=True
    ) as run_dir:
        lost_after_s = max(c.serving.lost_after_s, LOST_AFTER_S)
        patient = replace(c, serving=replace(c.serving, lost_after_s=lost_after_s))
        configuration.save(patient, Path(run_dir) / "config.json")
        env = launcher.environment(c)
        with Child([*host, *python, "rose.parts.doctor.host", run_dir], env) as coordinator:
            end = time.monotonic() + JOIN_S - END_S
            is_open = coordinator.until(lambda so_far: _nodes(so_far, "open"), OPEN_S)
            joiner_output = Ended(1, "", "")
            for starter in joiners(_nodes(coordinator.so_far(), "open")[0]) if is_open else ():
                with Child([*starter, *python, "rose.parts.doctor.joiner", run_dir], env) as joiner:
                    joiner_output = joiner.wait(max(1.0, end - time.monotonic()))
                if _nodes(joiner_output, "started"):
                    break
            coordinator_output = (
                coordinator.wait(lost_after_s + END_S)
                if joiner_output.code == 0
                else coordinator.so_far()
            )
    return joined(coordinator_output, joiner_output, c.cluster.kind == "slurm")


def _nodes(ended: Ended, what: str) -> list[str]:
    """Return the node of each event of this kind."""
    return [event["node"] for event in ended.events() if event["what"] == what]


def joined(host: Ended, joiner: Ended, two_nodes: bool) -> Finding:
    """Return the finding from both sides' events. `two_nodes`: warn if both ran on one node."""
    events = host.events()
    seen = {(event["what"], event["worker"]): event for event in events if "worker" in event}
    missing = [text for what, number, text in STAGES if (what, f"borrowed-{number}") not in seen]
    if not _nodes(host, "open"):
        remedy = "It needs what the lines above are about: the folder on that node, and MPI there"
        text = f"the coordinator's side did not start: {host.last}"
        return Finding("failed", PART, text, remedy)
    if missing:
        faults = [event["detail"] for event in events if event["what"] == "fault"]
        porters = [line for line in host.err.splitlines() if line.startswith("porter: ")]
        why = (porters or faults or [joiner.last])[0]
        return Finding("failed", PART, f"{missing[0]}: {why}", REMEDY)
    here, there = _nodes(host, "open")[0], _nodes(joiner, "started")[0]
    after = seen["joined", "borrowed-1"]["detail"].rpartition(", ")[2]
    text = (
        f"one of {there} joined {here} ({after}), was killed, which was noticed "
        f"{seen['lost', 'borrowed-1']['seconds']:.1f} s after its last message; the next joined "
        "and left"
    )
    if two_nodes and here == there:
        remedy = "Both sides ran on one node: try again when two are free"
        return Finding("warning", PART, text, remedy)
    return Finding("ok", PART, text)
