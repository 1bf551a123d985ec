"""Replicas beside the ranks of tests/trainer/tiny_world.py, in processes of their own."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from rose import config
from rose import protocol as p
from rose.comm import frames
from rose.comm.wire import decode, encode
from tests.trainer import tiny_world


def run_replica(job: dict, number: int, words: Path) -> None:
    """A replica's process; as quick to start as a rank's."""
    from rose.parts.replicas import process

    tiny_world.say_to(words)
    folder, end = Path(job["folder"]), time.monotonic() + tiny_world.DEADLINE_S
    while True:
        with suppress(ConnectionRefusedError):
            channel = socket.create_connection(("127.0.0.1", job["replica_port"]))
            break
        assert time.monotonic() < end, "rank 0 does not listen"
        time.sleep(0.1)
    config.save(tiny_world.settings(job), folder / f"replica{number}.json")
    read = config.load(folder / f"replica{number}.json")
    process.serve(read, folder / "model", str(number), channel)


class Helpers:
    """The replicas, as rank 0 knows them."""

    def __init__(self, job: dict) -> None:

        self._store, self._folder = str(Path(job["folder"]) / job["name"]), Path(job["folder"])
        self._channels: dict[int, tuple[socket.socket, frames.Frames]] = {}
        with socket.create_server(("127.0.0.1", job["replica_port"])) as server:
            server.settimeout(tiny_world.DEADLINE_S)
            for _ in range(job["replicas"]):
                channel, _ = server.accept()
                channel.settimeout(tiny_world.DEADLINE_S)
                found = channel, frames.Frames(channel, 2**30)
                ready = self._hear(found)
                assert isinstance(ready, p.ReplicaReady)
                self._channels[int(ready.worker)] = found

    def compute(self, number: int, version: int, step, rows):
        """Return the replica's `GradientSum` of the rows by the weights of `version`."""

        channel = self._channels[number]
        file = self._folder / f"gradient{number}-{step.step}"
        order = p.ComputeGradient(step.step, version, self._store, str(file))
        if version % 2:  # the order finds it there
            channel[0].sendall(frames.frame(encode(p.LoadVersion(version, self._store))))
        for message in (order, step, p.TrainPart(step.step, 0, list(rows), [*rows.values()])):
            channel[0].sendall(frames.frame(encode(message)))
        answer = self._hear(channel)
        assert isinstance(answer, p.GradientComputed), answer
        return answer.gradient

    def close(self) -> None:
        """End the replicas."""
        for channel, _ in self._channels.values():
            channel.close()

    @staticmethod
    def _hear(found):
        while not (whole := found[1].take()):
            assert whole is not None, "a replica has ended"
        [data] = whole
        return decode(data)


def share_step(trainer, job: dict, helpers: Helpers | None, version: int, args: list) -> dict:
    """A step in which the ranks compute their part beside `replicas`, and then the part of those
    that are `lost`; its metrics. `helpers`: of rank 0."""
    seed, limit, replicas, lost = args
    rows, summary = tiny_world.make_batch(seed)
    rank, ranks = trainer.index, job["ranks"]
    everyone, trees = tiny_world.plan(seed, rows, ranks + replicas, limit, 1)

    def step(own, **more):
        mine = {row: rows[row] for update in own for micro in update for row in micro}
        return p.TrainStep(version + 1, summary, own, trees, 1, **more), mine

    file = Path(job["folder"]) / "sums.json"
    if rank == 0:
        found = []
        for n in range(lost, replicas):
            found.append(helpers.compute(n, version, *step(everyone[ranks + n], more=True)))
        file.write_bytes(msgspec.json.encode(found))
    trainer._peers.barrier()
    sums = msgspec.json.decode(file.read_bytes(), type=list[p.GradientSum])
    missing = {row for own in everyone[ranks : ranks + lost] for u in own for m in u for row in m}
    last = [[[]]]
    if missing:
        numbers = sorted(missing)
        given = {at: rows[row] for at, row in enumerate(numbers)}
        last = [
            [[numbers[at] for at in micro] for micro in update]
            for update in tiny_world.plan(seed, given, ranks, limit, 1, part=True)[0][rank]
        ]
    trainer.train_ahead(*step(everyone[rank], more=True))
    return trainer.train(*step(last, sums=sums))
