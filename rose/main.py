"""Run one rank of a run: `python -m rose.main --run RUN_DIR --attempt N`, started by the launcher.

Ranks are the same on a laptop and on Slurm; only the launcher differs. All ranks have the same
command line, because a rank's number determines its role (rose/launch/layout.py). A rank imports
only the packages of its role. MPI is initialised inside the guarded process (rose/launch/guard.py).
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import socket
from pathlib import Path

from rose import config as cfg
from rose import protocol as p
from rose import scratch
from rose.comm import address
from rose.launch import guard, rank_status
from rose.launch.layout import Rank, layout
from rose.processes import importing

SEND_DEADLINE_S = 5.0  # longest wait until a rank's last messages are sent


def main() -> None:
    parser = argparse.ArgumentParser(description="one rank of a ROSE run; started by launch.py")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args()
    guard.run(args.run, args.attempt, lambda me: run_rank(me, args.run.resolve(), args.attempt))


def run_rank(me: Rank, run_dir: Path, attempt: int) -> None:
    """Join the MPI world, run the role and leave. Errors are sent to the coordinator and raised."""
    # Ranks ignore Ctrl-C, because the launcher then ends the run in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = cfg.load(run_dir / "config.json")
    # Checked here because MPI's own error would not name the interface.
    address.check_interface(config.cluster.interface)
    from mpi4py import MPI  # initialises MPI

    from rose.comm import mpi_process
    from rose.comm.mailbox import Mailbox, share_text, split_by_role
    from rose.comm.wire import COORDINATOR

    world = MPI.COMM_WORLD
    if world.Get_rank() != me.rank:
        raise RuntimeError(
            f"MPI calls this process rank {world.Get_rank()}, the launcher {me.rank}; is mpi4py "
            "built for MPICH, or under Slurm for the MPI that cluster.mpi names?"
        )
    mpi_process.unlink_shared(world)
    peers = split_by_role(world, me.role)
    rank_status.mark_joined(run_dir, attempt, me.rank)
    mailbox = Mailbox(world)
    found = _latest_checkpoint(run_dir) if me.rank == COORDINATOR else None
    what = "the coordinator's message from where to resume"
    latest = share_text(world, found, config.cluster.start_timeout_s, what)
    resume_from = Path(latest) if latest else None
    if me.rank != COORDINATOR:
        mailbox.send(
            COORDINATOR, p.Hello(me.rank, me.role, me.index, os.getpid(), socket.gethostname())
        )
    if config.cluster.kind == "slurm" and me.rank != COORDINATOR:
        # Slurm signals all processes of a job, but only the coordinator may end the run.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        broadcast = make_broadcast(config, world, run_dir)
        run_role(me, config, run_dir, attempt, mailbox, peers, broadcast, resume_from)
    except Exception as error:
        if me.rank != COORDINATOR:
            cause = f"{me.role.value} {me.index}: {type(error).__name__}: {error}"
            mailbox.send(COORDINATOR, p.RankFailed(me.rank, cause))
            mailbox.flush(SEND_DEADLINE_S)
        raise
    if me.rank != COORDINATOR:
        mailbox.send(COORDINATOR, p.Goodbye(me.rank))
    mailbox.flush(SEND_DEADLINE_S)
    scratch.remove_own()  # The guard ends this process without its exit functions.


def make_broadcast(config: cfg.Config, world, run_dir: Path):
    """Return this rank's end of the broadcast of weights from trainer ranks to dedicated rollout
    ranks. None on ranks of other roles, and in a run without a broadcast."""
    from rose.transfer import broadcast

    ranks = layout(config)
    trainers, rollouts = (
        [r.rank for r in ranks if r.role is role] for role in (p.Role.TRAINER, p.Role.ROLLOUT)
    )
    # `auto` is MPI, because engines need the weight differences in host memory. NCCL would copy
    # them through both GPUs, and would need a CUDA context and one communicator per trainer rank
    # on each engine's device.
    kind = "mpi" if config.transfer.broadcast == "auto" else config.transfer.broadcast
    return broadcast.make_broadcast(
        kind,
        world,
        trainers,
        rollouts,
        config.transfer.load_timeout_s,
        run_dir,
        int(config.transfer.mirror_gib * 2**30),  # Beyond its limit the kernel would end the job.
        config.cluster.interface,
    )


def run_role(
    me: Rank,
    config: cfg.Config,
    run_dir: Path,
    attempt: int,
    mailbox,
    peers,
    broadcast,
    resume_from: Path | None,
) -> None:
    """Run this rank's role until the run ends."""
    from rose.observe.recorder import NullRecorder, Recorder

    name = f"{me.role.value}-{me.index}"
    recorder = (
        Recorder(run_dir, me.rank, me.role.value, name, attempt)
        # An environment host's own process records its trace.
        if config.observe.trace and me.role is not p.Role.ENVIRONMENT
        else NullRecorder()
    )
    try:
        match me.role:
            case p.Role.COORDINATOR:
                from rose.coordinator.coordinator import Coordinator, drive

                asyncio.run(
                    drive(Coordinator(config, run_dir, attempt, mailbox, recorder, resume_from))
                )
            case p.Role.ENVIRONMENT:
                from rose.agent.rank import HostRank

                asyncio.run(HostRank(config, run_dir, attempt, me, mailbox).run())
            case p.Role.REWARD:
                from rose import extensions

                rank = extensions.only("reward_rank").RewardRank
                asyncio.run(rank(config, run_dir, attempt, me.index, mailbox, recorder).run())
            case p.Role.TRAINER:
                # Importing mlflow takes a second, and only DeepSpeed's autotuner uses it.
                with importing("mlflow"):
                    from rose.trainer import rank as trainer

                begun = functools.partial(rank_status.mark_begun, run_dir, attempt, me.rank)
                check_card = functools.partial(_check_card, config, me.index)
                where = config, run_dir, attempt, mailbox, peers, broadcast, recorder, resume_from
                trainer.run(*where, begun, check_card)
            case p.Role.ROLLOUT:
                from rose.engine.rank import RolloutWorker

                hybrid = me.index >= config.rollout.workers
                worker = RolloutWorker(config, name, mailbox, recorder, broadcast, hybrid)
                asyncio.run(worker.run())
    finally:
        recorder.close()


def _check_card(config: cfg.Config, trainer: int, shape: cfg.ModelShape, device) -> None:
    """Check that a trainer's GPU has the memory that the launcher's choices assumed."""
    if device.type == "cuda":
        from rose import memory
        from rose.launch import choices

        choices.check_card(config, shape, trainer, memory.device_memory(device).total)


def _latest_checkpoint(run_dir: Path) -> str | None:
    """Remove incomplete checkpoints and return the path of the newest one."""
    from rose.trainer import checkpoint

    checkpoint.remove_halves(run_dir)
    found = checkpoint.latest(run_dir)
    return str(found) if found else None


if __name__ == "__main__":
    main()
