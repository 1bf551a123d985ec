"""The loop of a trainer rank: receive a batch, train, publish the version, save when ordered to."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

from rose import energy, memory
from rose import protocol as p
from rose.comm import address
from rose.comm.mailbox import Mailbox, gather_texts
from rose.comm.wire import COORDINATOR
from rose.config import Config, ModelShape, read_shape
from rose.engine import layout
from rose.models import resolve
from rose.observe.recorder import NullRecorder
from rose.trainer import checkpoint
from rose.trainer.deepspeed_engine import use_device
from rose.trainer.trainer import Trainer
from rose.trainer.watch import BEAT_SHARE, Watch
from rose.transfer.broadcast import Broadcast

FLUSH_S = 5.0  # seconds to wait until a message has been sent


def run(
    config: Config,
    run_dir: Path,
    attempt: int,
    mailbox: Mailbox,
    peers: MPI.Comm,
    broadcast: Broadcast | None,
    recorder: NullRecorder,
    resume_from: Path | None,
    report_begun: Callable[[int | None, float], None],
    check_card: Callable[[ModelShape, Any], None],
) -> None:
    """Run until the coordinator sends `Shutdown`. `peers` are the trainer ranks; torch.distributed
    gets a port of its own at the first of them. `broadcast` sends to the dedicated rollout ranks.
    `report_begun` is the `report` of `Watch`, and also gets the seconds between two reports.
    `check_card` raises `ConfigError` for a GPU that is too small, before the model is loaded."""
    index, world = peers.Get_rank(), peers.Get_size()
    # All ranks meet here, since imports from a cold file system take seconds to minutes.
    what = "the trainers' start (cluster.start_timeout_s)"
    gather_texts(peers, "", config.cluster.start_timeout_s, what)
    place = address.meet(
        lambda text: gather_texts(peers, text, address.MEET_S, "the trainers' addresses"),
        index,
        config.cluster.interface,
    )
    model = resolve(config.model)
    shape = read_shape(model)
    check_card(shape, use_device(config.cluster.gpus, index))
    trainer = Trainer(config, index, world, place, model, recorder)
    store = Path(run_dir) / "weights" / f"attempt-{attempt:03d}"
    if index == 0:
        # Remove versions of earlier attempts, which no engine holds.
        shutil.rmtree(store.parent, ignore_errors=True)
    degrees = {*config.transfer.tensor_parallel, config.rollout.tensor_parallel}
    trainer.open_store(store, lambda name, extent: layout.cuts(name, extent, shape, degrees))
    step = 0
    if resume_from is not None:
        step = checkpoint.step_of(resume_from)
        trainer.load(resume_from)
    send = broadcast.send if broadcast else None
    trainer.publish(step, send)
    if config.trainer_sleeps:
        trainer.share_device(run_dir)
    trees, used = (trainer.no_trees, trainer.costs), energy.counters()
    ready = p.TrainerReady(index, step, step, str(store), *trees, energy_j=used)
    mailbox.send(COORDINATOR, ready)
    beat_s = config.trainer.step_timeout_s * BEAT_SHARE
    watch = Watch(beat_s, trainer.progress, lambda begun: report_begun(begun, beat_s))
    incoming: p.TrainStep | None = None
    rows: dict[int, p.Trajectory] = {}
    parts, untidy = 0, False
    while True:
        _, message = mailbox.receive_blocking(None, "the next step")
        match message:
            case p.TrainStep():
                incoming, rows, parts = message, {}, 0
            case p.TrainPart():
                rows.update(zip(message.indices, message.trajectories, strict=True))
                parts += 1
            case p.SaveCheckpoint():
                trainer.save(Path(message.folder))
                continue
            case p.Sleep() | p.Wake():
                _change_device(trainer, message, mailbox)
                if isinstance(message, p.Sleep) and untidy:
                    trainer.tidy()  # runs during the rollout phase
                    untidy = False
                continue
            case p.Shutdown():
                trainer.close()
                return
            case _:
                raise ValueError(f"a trainer rank has no use for {type(message).__name__}")
        if incoming is None or parts < incoming.parts:
            continue
        if incoming.more:
            with watch.step():
                trainer.train_ahead(incoming, rows)
            mailbox.send(COORDINATOR, p.TrainedAhead(incoming.step, index))
            mailbox.flush(FLUSH_S)
            incoming = None
        else:
            with watch.step():
                metrics = trainer.train(incoming, rows, publish_as=incoming.step)
            published = trainer.publish(incoming.step, send)
            metrics |= {
                "publish_bytes": float(published.nbytes),
                "seconds_encode": published.encode_s,
                "seconds_publish": published.encode_s + published.write_s,
            }
            at, used = incoming.step, energy.counters()
            done = p.TrainDone(at, index, at, metrics, str(store), energy_j=used)
            mailbox.send(COORDINATOR, done)
            mailbox.flush(FLUSH_S)
            if broadcast is not None:
                broadcast.catch_up()
            incoming, untidy = None, config.shares_devices
            if not untidy:
                trainer.tidy()


def _change_device(trainer: Trainer, order: p.Sleep | p.Wake, mailbox: Mailbox) -> None:
    """Release the device on `Sleep`, reclaim it on `Wake`, and answer `DeviceChanged`."""
    began, before = time.time(), memory.device_memory(trainer.device)
    awake = isinstance(order, p.Wake)
    now = trainer.take_device() if awake else trainer.give_device_back()
    figures = (time.time() - began, abs(now.freed_since(before)), now.free, now.total)
    mailbox.send(COORDINATOR, p.DeviceChanged(mailbox.rank, order.turn, awake, *figures))
    mailbox.flush(FLUSH_S)
