"""Workers that can take turns now, indexed: each question of a routing policy costs O(log workers).

Ready are those with the newest weights that take turns and neither load, drain nor rest. They lie
in pools of one kind, hardware and label, which a routing policy may give them; apart are those from
which memory was taken back, and those of which only a part is lent, by its size. A pool knows its
workers with room by load and by room.

A turn that can't be placed keeps its place: the workers that could hold it are kept for it until
the end of the round, or small turns would starve a large one. These are the workers that the policy
asked for in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice

from sortedcontainers import SortedList

from rose.scheduler.ranking import Ranking
from rose.scheduler.state import FREE, UNBOUNDED, Cluster, TurnState, WorkerState

LOOK = 16  # workers seen in order of load before those with most room are: bounds a decision


class Fleet:
    """`queue_depth`: turns beyond a worker's sequences, as a share of these. `label`: see
    `policies.Routing`."""

    def __init__(
        self,
        cluster: Cluster,
        queue_depth: float,
        label: Callable[[str], Hashable] = lambda worker: "",
    ) -> None:
        self._cluster, self._queue_depth, self._label = cluster, queue_depth, label
        self._pools: dict[tuple, _Pool] = {}
        self._places: dict[str, _Place] = {}
        self._names = SortedList()
        self._changed: dict[str, None] = {}
        self._roomy: dict[_Pool, None] = {}  # those that have workers with room
        self._asked: dict[
            str | tuple, None
        ] = {}  # in vain, for the turn at hand: a name, or (kind, hardware, label)
        self._floored: list[_Pool] = []  # those of which something is kept in this round
        self._kept: dict[
            str, int
        ] = {}  # worker -> what it can hold is kept, of turns of so much need

    # ----------------------------------------------------------------- what policies ask

    def get(self, name: str, turn: TurnState) -> WorkerState | None:
        """The worker, if it is ready and has room for the turn."""
        if self._changed:
            self._settle()
        place = self._places.get(name)
        if place is None:
            return None
        if place.room >= turn.kv_need and name != turn.avoid and self._open(place):
            return place.worker
        self._asked[name] = None
        return None

    def least(
        self,
        turn: TurnState,
        *,
        kind: str | None = None,
        hardware: str | None = None,
        label: Hashable | None = None,
    ) -> WorkerState | None:
        """The least loaded with room for it, by name where loads are equal; those from which memory
        was taken back come last. After LOOK that have no room it may be the one with most room
        instead."""
        if self._changed:
            self._settle()
        best = None
        for pool in self._roomy:
            if pool.is_of(kind, hardware, label):
                found = pool.least(turn, self._kept)
                if found is not None:
                    found = pool.revoked, *found
                    best = found if best is None else min(best, found)
        if best is not None:
            return self._places[best[2]].worker
        place = self._places.get(turn.avoid) if turn.avoid else None
        if (
            place is not None
            and place.room >= turn.kv_need
            and self._open(place)
            and (place.pool.is_of(kind, hardware, label))
        ):
            return place.worker
        self._asked[kind, hardware, label] = None
        return None

    def least_of_each(self, turn: TurnState) -> list[WorkerState]:
        """Of each kind and hardware the least loaded with room for it, by name where loads are
        equal."""
        if self._changed:
            self._settle()
        best: dict[tuple[str, str], tuple[float, str]] = {}
        for pool in self._roomy:
            if found := pool.least(turn, self._kept):
                sort = pool.kind, pool.hardware
                best[sort] = min(best.get(sort, found), found)
        if best:
            return [self._places[name].worker for _, name in best.values()]
        last = self.least(turn)
        return [] if last is None else [last]

    def after(self, name: str, turn: TurnState) -> WorkerState | None:
        """The next by name with room for it, and after the last the first again."""
        self._settle()
        if not self._roomy:
            return self.least(turn)
        start = self._names.bisect_right(name)
        revoked = None
        for other in islice(self._around(start), LOOK):
            place = self._places[other]
            if place.room >= turn.kv_need and other != turn.avoid and self._open(place):
                if not place.pool.revoked:
                    return place.worker
                revoked = revoked or place.worker
        return self.least(turn) if revoked is None or len(self) > LOOK else revoked

    def is_ready(self, worker: WorkerState) -> bool:
        """Whether it can take turns now, if it has room."""
        return (
            worker.version == self._cluster.version
            and worker.takes
            and not (worker.loading or worker.draining or worker.resting)
        )

    def room_without(self, worker: WorkerState, turns: Sequence[TurnState]) -> int:
        """`WorkerState.room` once these of its turns are gone."""
        needs = sum(turn.kv_need for turn in turns)
        return worker.room_without(self._queue_depth, len(turns), needs)

    def __len__(self) -> int:
        self._settle()
        return len(self._names)

    def __iter__(self) -> Iterator[WorkerState]:
        """Ready workers by name; O(workers)."""
        self._settle()
        return (self._places[name].worker for name in self._names)

    # ----------------------------------------------------------------- the scheduler's updates

    def changed(self, worker: str) -> None:
        """Anything about it: it is looked at before the next answer."""
        self._changed[worker] = None

    def begin_round(self) -> None:
        """Nothing is kept for anybody."""
        for pool in self._floored:
            pool.floor = FREE
        self._floored.clear()
        self._kept.clear()

    def begin_turn(self) -> None:
        self._asked.clear()

    def keep(self, turn: TurnState) -> None:
        """The turn waits: what it asked for in vain is kept for it, as far as it could hold the
        turn."""
        for asked in self._asked:
            if isinstance(asked, str):
                self._kept[asked] = min(self._kept.get(asked, FREE), turn.kv_need)
            else:
                self.keep_all(turn.kv_need, *asked)

    def keep_all(
        self,
        need: int,
        kind: str | None = None,
        hardware: str | None = None,
        label: Hashable | None = None,
    ) -> None:
        """Whoever of these could hold a turn of so much need is kept for one."""
        for pool in self._roomy:  # others have nothing to keep, and get nothing in a round
            if pool.is_of(kind, hardware, label):
                if pool.floor == FREE:
                    self._floored.append(pool)
                pool.floor = min(pool.floor, need)

    def holds(self) -> int:
        """KV tokens of the largest turn that one of the workers with room could hold if it had no
        other, and isn't kept from; 0 or less: no turn need be looked at."""
        if self._changed:
            self._settle()
        most = 0
        for pool in self._roomy:
            most = max(most, pool.holds if pool.floor == FREE else pool.largest(pool.holds))
        return most

    def room(self) -> int:
        """KV tokens above which no turn finds a place now; a bound."""
        if self._changed:
            self._settle()
        most = 0
        for pool in self._roomy:
            most = max(most, pool.largest(pool.room))
        return most

    # ----------------------------------------------------------------- inside

    def _around(self, start: int) -> Iterator[str]:
        yield from self._names.islice(start)
        yield from self._names.islice(0, start)

    def _open(self, place: _Place) -> bool:
        return _open(place, place.pool.floor, self._kept)

    def _settle(self) -> None:
        changed, workers, places = self._changed, self._cluster.workers, self._places
        while changed:
            name, _ = changed.popitem()
            worker, place = workers.get(name), places.get(name)
            if worker is not None and self.is_ready(worker):
                if place is None:
                    self._names.add(name)
                    place = places[name] = _Place(worker)
                self._put(worker, place)
            elif place is not None:
                place.pool.take_out(place)
                del places[name]
                self._names.remove(name)

    def _put(self, worker: WorkerState, place: _Place) -> None:
        holds = worker.holds
        if (
            place.pool is None
            or place.worker is not worker
            or place.holds != holds
            or (place.pool.revoked is not worker.revoked)
        ):
            if place.pool is not None:
                place.pool.take_out(place)
            part = 0 if holds == UNBOUNDED else holds.bit_length()
            key = worker.kind, worker.hardware, self._label(worker.worker), worker.revoked, part
            if key not in self._pools:
                self._pools[key] = _Pool(self._roomy, *key)
            place.worker, place.holds, place.pool = worker, holds, self._pools[key]
        place.room, place.load = worker.room(self._queue_depth), worker.load
        place.pool.rank(place)


class _Place:
    """Where a worker lies, by what it was when it was put there."""

    __slots__ = ("worker", "pool", "load", "room", "holds")

    def __init__(self, worker: WorkerState) -> None:
        self.worker = worker
        self.pool: _Pool | None = None


class _Pool:
    """Workers of one sort. `part`: 0 if they are lent whole, else the bits of the KV tokens that
    one holds. `floor`: those that hold a turn of so much need are kept for one."""

    def __init__(
        self,
        roomy: dict[_Pool, None],
        kind: str,
        hardware: str,
        label: Hashable,
        revoked: bool,
        part: int,
    ) -> None:
        self.kind, self.hardware, self.label, self.revoked, self.part = (
            kind,
            hardware,
            label,
            revoked,
            part,
        )
        self.floor = FREE
        self._roomy = roomy  # the pools that have workers with room
        self._by_load = Ranking()  # (load, name) of those with room
        self._by_room = Ranking()  # (-room, load, name) of the same
        self._places: dict[str, _Place] = {}
        self.holds = UNBOUNDED if part == 0 else (1 << part) - 1  # no member holds more

    def is_of(self, kind: str | None, hardware: str | None, label: Hashable | None) -> bool:
        """None: any."""
        return (
            (kind is None or self.kind == kind)
            and (hardware is None or self.hardware == hardware)
            and (label is None or self.label == label)
        )

    def rank(self, place: _Place) -> None:
        """By its load and room now."""
        name = place.worker.worker
        if place.room > 0:
            self._by_load.add(name, place.load)
            self._by_room.add(name, -place.room, place.load)
            if not self._places:
                self._roomy[self] = None
            self._places[name] = place
        elif name in self._places:
            self._no_room(name)

    def take_out(self, place: _Place) -> None:
        if place.worker.worker in self._places:
            self._no_room(place.worker.worker)

    def _no_room(self, name: str) -> None:
        self._by_load.remove(name)
        self._by_room.remove(name)
        del self._places[name]
        if not self._places:
            del self._roomy[self]

    @property
    def room(self) -> int:
        return -self._by_room.first()[0]

    def largest(self, most: int) -> int:
        """`most`, or less: what is kept; 0 if that is the whole pool."""
        if self.floor == FREE:
            return most
        if self.part == 0 or self.floor <= 1 << self.part - 1:
            return 0
        return min(most, self.floor - 1)

    def least(self, turn: TurnState, kept: dict[str, int]) -> tuple[float, str] | None:
        """(load, name)."""
        if self.largest(self.room) < turn.kv_need:
            return None

        def suits(name: str) -> bool:
            place = self._places[name]
            return (
                place.room >= turn.kv_need and name != turn.avoid and _open(place, self.floor, kept)
            )

        if found := self._by_load.find(suits, LOOK):
            return found[0]
        if len(self._places) <= LOOK:
            return None
        return min(
            (entry[1:] for entry in self._by_room.find(suits, LOOK, all_of_them=True)), default=None
        )


def _open(place: _Place, floor: int, kept: dict[str, int]) -> bool:
    """Not kept for a turn that waits."""
    return place.holds < floor and (not kept or place.holds < kept.get(place.worker.worker, FREE))
