"""Index of the workers that can take turns now. Each question of a policy costs O(log workers).

A worker is *ready* when it has the newest weights, accepts turns, and isn't loading, draining or
resting. Ready workers are grouped into pools of one kind, hardware and label (a routing policy may
assign labels). Workers whose memory was revoked get pools of their own. Workers that lend only part
of their KV cache get one pool for each power of two of that part. A pool ranks its workers with
room twice, by load and by room.

A turn that finds no worker stays in the queue. Until the end of the round, the workers that the
policy asked for and that could hold the turn are reserved for it. Otherwise small turns would
starve a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice

from sortedcontainers import SortedList

from rose.scheduler.ranking import Ranking
from rose.scheduler.state import NOT_RESERVED, UNBOUNDED, Cluster, TurnState, WorkerState

# Most workers of a pool that a question examines in order of load, and then in order of room. This
# bounds the cost of a decision.
MOST_EXAMINED = 16


class Fleet:
    """The index. A worker gets at most (1 + `queue_depth`) times `max_sequences` turns. `label`
    maps a worker's name to its label (`policies.Routing`)."""

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
        self._roomy: dict[_Pool, None] = {}  # pools that have workers with room
        # The policy's questions about the current turn that found no worker: a worker's name, or
        # (kind, hardware, label)
        self._unmet: dict[str | tuple, None] = {}
        self._reserved_pools: list[_Pool] = []  # pools with `reserved_for` set in this round
        # Worker -> smallest KV need of the turns that wait for it; reserved if it can hold this
        self._reserved: dict[str, int] = {}

    # ----------------------------------------------------------------- what policies ask

    def get(self, name: str, turn: TurnState) -> WorkerState | None:
        """Return the worker if it is ready and has room for the turn."""
        if self._changed:
            self._update_places()
        place = self._places.get(name)
        if place is None:
            return None
        if place.room >= turn.kv_need and name != turn.avoid and self._unreserved(place):
            return place.worker
        self._unmet[name] = None
        return None

    def least(
        self,
        turn: TurnState,
        *,
        kind: str | None = None,
        hardware: str | None = None,
        label: Hashable | None = None,
    ) -> WorkerState | None:
        """Return the least loaded worker with room for the turn, the first by name among equals.

        Workers whose memory was revoked come last, and after them `turn.avoid`. If none of the
        MOST_EXAMINED least loaded of a pool has room, its workers with most room are tried.
        """
        if self._changed:
            self._update_places()
        best = None
        for pool in self._roomy:
            if pool.is_of(kind, hardware, label):
                found = pool.least(turn, self._reserved)
                if found is not None:
                    found = pool.revoked, *found
                    best = found if best is None else min(best, found)
        if best is not None:
            return self._places[best[2]].worker
        place = self._places.get(turn.avoid) if turn.avoid else None
        if (
            place is not None
            and place.room >= turn.kv_need
            and self._unreserved(place)
            and (place.pool.is_of(kind, hardware, label))
        ):
            return place.worker
        self._unmet[kind, hardware, label] = None
        return None

    def least_of_each(self, turn: TurnState) -> list[WorkerState]:
        """Return, for each kind and hardware, the least loaded worker with room for the turn."""
        if self._changed:
            self._update_places()
        best: dict[tuple[str, str], tuple[float, str]] = {}
        for pool in self._roomy:
            if found := pool.least(turn, self._reserved):
                sort = pool.kind, pool.hardware
                best[sort] = min(best.get(sort, found), found)
        if best:
            return [self._places[name].worker for _, name in best.values()]
        last = self.least(turn)
        return [] if last is None else [last]

    def after(self, name: str, turn: TurnState) -> WorkerState | None:
        """Return the next worker by name with room for the turn; the first name follows the last.

        Workers whose memory was revoked come last. After MOST_EXAMINED names without room the least
        loaded worker is taken.
        """
        self._update_places()
        if not self._roomy:
            return self.least(turn)
        start = self._names.bisect_right(name)
        revoked = None
        for other in islice(self._names_from(start), MOST_EXAMINED):
            place = self._places[other]
            if place.room >= turn.kv_need and other != turn.avoid and self._unreserved(place):
                if not place.pool.revoked:
                    return place.worker
                revoked = revoked or place.worker
        return self.least(turn) if revoked is None or len(self) > MOST_EXAMINED else revoked

    def is_ready(self, worker: WorkerState) -> bool:
        """True if the worker can take turns, whether or not it has room now."""
        return (
            worker.version == self._cluster.version
            and worker.accepts_turns
            and not (worker.loading or worker.draining or worker.resting)
        )

    def room_without(self, worker: WorkerState, turns: Sequence[TurnState]) -> int:
        """Return `WorkerState.room` as if the worker did not have these turns."""
        return worker.room(self._queue_depth, turns)

    def __len__(self) -> int:
        self._update_places()
        return len(self._names)

    def __iter__(self) -> Iterator[WorkerState]:
        """Iterate over the ready workers by name; O(workers)."""
        self._update_places()
        return (self._places[name].worker for name in self._names)

    # ----------------------------------------------------------------- the scheduler's updates

    def changed(self, worker: str) -> None:
        """Mark the worker's state as changed; it is read again before the next answer."""
        self._changed[worker] = None

    def begin_round(self) -> None:
        """Clear all reservations."""
        for pool in self._reserved_pools:
            pool.reserved_for = NOT_RESERVED
        self._reserved_pools.clear()
        self._reserved.clear()

    def begin_turn(self) -> None:
        """Forget the policy's questions about the turn before."""
        self._unmet.clear()

    def reserve(self, turn: TurnState) -> None:
        """Reserve for the turn the workers that the policy asked for and that could hold it."""
        for asked in self._unmet:
            if isinstance(asked, str):
                self._reserved[asked] = min(self._reserved.get(asked, NOT_RESERVED), turn.kv_need)
            else:
                self.reserve_all(turn.kv_need, *asked)

    def reserve_all(
        self,
        need: int,
        kind: str | None = None,
        hardware: str | None = None,
        label: Hashable | None = None,
    ) -> None:
        """Reserve the workers of the matching pools that could hold a turn of `need` KV tokens."""
        for pool in self._roomy:  # Pools without room get no turns in this round anyway.
            if pool.is_of(kind, hardware, label):
                if pool.reserved_for == NOT_RESERVED:
                    self._reserved_pools.append(pool)
                pool.reserved_for = min(pool.reserved_for, need)

    def largest_turn(self) -> int:
        """Upper bound of the KV tokens of a turn that some unreserved worker with room could hold
        if it were empty. At 0, no further turn finds a worker in this round."""
        if self._changed:
            self._update_places()
        most = 0
        for pool in self._roomy:
            most = max(
                most,
                pool.largest_turn
                if pool.reserved_for == NOT_RESERVED
                else pool.unreserved(pool.largest_turn),
            )
        return most

    def room(self) -> int:
        """Upper bound of the KV tokens of a turn that finds a worker now."""
        if self._changed:
            self._update_places()
        most = 0
        for pool in self._roomy:
            most = max(most, pool.unreserved(pool.room))
        return most

    # ----------------------------------------------------------------- inside

    def _names_from(self, start: int) -> Iterator[str]:
        yield from self._names.islice(start)
        yield from self._names.islice(0, start)

    def _unreserved(self, place: _Place) -> bool:
        return _unreserved(place, place.pool.reserved_for, self._reserved)

    def _update_places(self) -> None:
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
        """Move a ready worker to the pool that it belongs to now, and rank it there."""
        largest_turn = worker.largest_turn
        if (
            place.pool is None
            or place.worker is not worker
            or place.largest_turn != largest_turn
            or (place.pool.revoked is not worker.revoked)
        ):
            if place.pool is not None:
                place.pool.take_out(place)
            part = 0 if largest_turn == UNBOUNDED else largest_turn.bit_length()
            key = worker.kind, worker.hardware, self._label(worker.worker), worker.revoked, part
            if key not in self._pools:
                self._pools[key] = _Pool(self._roomy, *key)
            place.worker, place.largest_turn, place.pool = worker, largest_turn, self._pools[key]
        place.room, place.load = worker.room(self._queue_depth), worker.load
        place.pool.rank(place)


class _Place:
    """A ready worker's pool, and its load and capacity when the pool last ranked it."""

    __slots__ = ("worker", "pool", "load", "room", "largest_turn")

    def __init__(self, worker: WorkerState) -> None:
        self.worker = worker
        self.pool: _Pool | None = None


class _Pool:
    """Ready workers of one kind, hardware, label, `revoked` and `part`.

    `part` is 0 if the workers lend their whole KV cache, else the bit length of the tokens that
    they lend. Members that can hold a turn of `reserved_for` KV tokens are reserved for it.
    """

    def __init__(
        self,
        roomy: dict[_Pool, None],
        kind: str,
        hardware: str,
        label: Hashable,
        revoked: bool,
        part: int,
    ) -> None:
        self.kind, self.hardware, self.label = kind, hardware, label
        self.revoked, self.part = revoked, part
        self.reserved_for = NOT_RESERVED
        self._roomy = roomy  # the fleet's pools that have workers with room
        self._by_load = Ranking()  # (load, name) of the members with room
        self._by_room = Ranking()  # (-room, load, name) of the same
        self._places: dict[str, _Place] = {}
        self.largest_turn = UNBOUNDED if part == 0 else (1 << part) - 1  # bound for all members

    def is_of(self, kind: str | None, hardware: str | None, label: Hashable | None) -> bool:
        """True if the pool matches; None matches any value."""
        return (
            (kind is None or self.kind == kind)
            and (hardware is None or self.hardware == hardware)
            and (label is None or self.label == label)
        )

    def rank(self, place: _Place) -> None:
        """Rank the worker by its current load and room, or remove it if it has no room."""
        name = place.worker.worker
        if place.room > 0:
            self._by_load.add(name, place.load)
            self._by_room.add(name, -place.room, place.load)
            if not self._places:
                self._roomy[self] = None
            self._places[name] = place
        elif name in self._places:
            self._unrank(name)

    def take_out(self, place: _Place) -> None:
        if place.worker.worker in self._places:
            self._unrank(place.worker.worker)

    def _unrank(self, name: str) -> None:
        self._by_load.remove(name)
        self._by_room.remove(name)
        del self._places[name]
        if not self._places:
            del self._roomy[self]

    @property
    def room(self) -> int:
        return -self._by_room.first()[0]

    def unreserved(self, most: int) -> int:
        """Return the smaller of `most` and the largest turn that unreserved members can hold; 0
        if all members are reserved."""
        if self.reserved_for == NOT_RESERVED:
            return most
        if self.part == 0 or self.reserved_for <= 1 << self.part - 1:
            return 0
        return min(most, self.reserved_for - 1)

    def least(self, turn: TurnState, reserved: dict[str, int]) -> tuple[float, str] | None:
        """Return (load, name) of the least loaded member with room for the turn."""
        if self.unreserved(self.room) < turn.kv_need:
            return None

        def suits(name: str) -> bool:
            place = self._places[name]
            return (
                place.room >= turn.kv_need
                and name != turn.avoid
                and _unreserved(place, self.reserved_for, reserved)
            )

        if found := self._by_load.find(suits, MOST_EXAMINED):
            return found[0]
        if len(self._places) <= MOST_EXAMINED:
            return None
        found = self._by_room.find(suits, MOST_EXAMINED, all_of_them=True)
        return min((entry[1:] for entry in found), default=None)


def _unreserved(place: _Place, reserved_for: int, reserved: dict[str, int]) -> bool:
    """True if the worker isn't reserved for a waiting turn."""
    largest = place.largest_turn
    return largest < reserved_for and (
        not reserved or largest < reserved.get(place.worker.worker, NOT_RESERVED)
    )
