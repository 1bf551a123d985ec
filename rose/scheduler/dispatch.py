"""Queue of turns, and the rounds that assign waiting turns to workers and move running ones.

A *lane* is a part of the queue whose turns wait for the same reason (`Routing.lane`). The cost of a
round doesn't grow with the number of waiting turns: the routing policy is asked only about turns
for which some worker has room, and in a lane only until LOOK_AHEAD turns have found no worker.
Turns that need more room than any worker has are skipped together. The workers that could hold the
smallest skipped turn are reserved for it, whatever their kind.

A *watched* worker may be slow (`Routing.watches`). A turn that runs on it keeps its place in the
queue's order. When another worker gets free, the policy is asked about moving this turn before it
is asked about later turns. So the turn is no worse off than a turn that still waits.

Turns of evaluations (`TurnState.held_out`) don't delay training:
1. They come after all training turns.
2. They prefer borrowed workers.
3. When a training turn finds no worker they are preempted: they return to the queue with the tokens
   generated so far.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Any

from rose.scheduler.events import AbortTurn, AssignTurn, Event
from rose.scheduler.fleet import Fleet
from rose.scheduler.held_out import HeldOut
from rose.scheduler.policies import Order, Routing
from rose.scheduler.state import NOT_RESERVED, UNBOUNDED, Cluster, TurnState, WorkerState
from rose.scheduler.turn_queue import Entry, TurnQueue

# A round skips the rest of a lane after this many of its turns have found no worker. This bounds
# the calls of the policy.
LOOK_AHEAD = 32
MAX_MOVES = 2  # most moves of one running turn to faster workers
# Most running turns that the policy is asked about: after an unwatched worker got free, at a tick
ASKED_WHEN_FREED = 1
ASKED_AT_TICK = 32


class Dispatch:
    def __init__(self, cluster: Cluster, fleet: Fleet, routing: Routing, order: Order) -> None:
        self._cluster, self._fleet, self._order = cluster, fleet, order
        self._choose = routing.choose
        self._chunk = getattr(routing, "chunk", lambda turn, worker: 0)
        self._kv_need = getattr(routing, "kv_need", lambda turn: turn.whole_kv_need)
        self._has_lanes = hasattr(routing, "lane")
        self._lane = getattr(routing, "lane", lambda turn: "")
        self._changed = getattr(order, "changed", None)
        self._watches = getattr(routing, "watches", lambda worker: False)
        self._better = getattr(routing, "better", None)
        self._closed = getattr(routing, "closed", lambda: False)
        self._watched = TurnQueue()  # running turns that may move
        self._held_out = HeldOut(cluster, fleet)  # running turns of evaluations
        self._waiting_held_out = 0  # waiting turns of evaluations
        self._last_asked: Entry | None = None  # last running turn that a tick asked about
        self._freed = ""  # unwatched worker that a turn left since the last round; "" if none
        self._lanes: dict[Hashable, TurnQueue] = {}  # lanes with waiting turns

    def add(self, turn: TurnState) -> None:
        turn.kv_need, turn.lane = self._kv_need(turn), self._lane(turn)
        if turn.lane not in self._lanes:
            self._lanes[turn.lane] = TurnQueue()
        self._lanes[turn.lane].add(turn, self._key(turn))
        self._cluster.waiting += 1
        self._waiting_held_out += turn.held_out

    def _key(self, turn: TurnState) -> tuple[bool, Any]:
        return turn.held_out, self._order.key(turn, self._cluster)

    def remove(self, turn: TurnState) -> None:
        lane = self._lanes[turn.lane]
        lane.remove(turn)
        if not lane:
            del self._lanes[turn.lane]
        self._cluster.waiting -= 1
        self._waiting_held_out -= turn.held_out

    def requeue(self, turn: TurnState) -> None:
        """Take the turn from its worker and queue it at its old place."""
        self.left_worker(turn)
        self._cluster.workers[turn.worker].free(turn)
        self._fleet.changed(turn.worker)
        turn.worker = None
        self.add(turn)

    def reorder(self, event: Event) -> None:
        """Queue the waiting turns whose keys the event has changed at their new places."""
        for name in self._changed(event, self._cluster) if self._changed else ():
            turn = self._cluster.turns.get(name)
            if turn is not None and turn.worker is None:
                self.remove(turn)
                self.add(turn)

    def left_worker(self, turn: TurnState) -> None:
        """Stop tracking the turn as a running one. Call this while it still names its worker."""
        if turn.held_out:
            self._held_out.remove(turn)
        if turn.turn in self._watched:
            self._watched.remove(turn)
        elif not self._watches(self._cluster.workers[turn.worker]):
            self._freed = turn.worker

    def may_move(self, tick: bool) -> bool:
        """True if a round would ask the policy to move running turns."""
        return len(self._watched) > 0 and (tick or self._freed != "")

    def round(self, at: float, tick: bool = False) -> list[AbortTurn | AssignTurn]:
        """Assign waiting turns to workers with room, as far as the policy wants, and move a few
        running turns. Return the actions in order. An assignment follows the aborts that make room
        for it."""
        actions = self._assign_waiting(at, tick)
        while found := self._preemption():
            turn, preempted = found
            for other in preempted:
                actions.append(AbortTurn(other.turn, other.worker, other.attempt, "training"))
                self.requeue(other)
            actions += self._assign_waiting(at)
            turn.preemption_failed = turn.worker is None
        return actions

    def _preemption(self) -> tuple[TurnState, list[TurnState]] | None:
        """Find the first waiting training turn that finds room only by preemption. Return it with
        the evaluation turns to preempt; None if there is no such turn.

        If preemption can't make room for a turn, the workers that could hold it are reserved for
        it, and smaller turns are tried. Nothing is reserved for a turn with `preemption_failed`.
        """
        if not self._held_out or self._cluster.waiting == self._waiting_held_out:
            return None
        self._fleet.begin_round()
        heads, reserved_for = self._heads(UNBOUNDED), NOT_RESERVED
        while heads:
            entry, name = heappop(heads)
            turn = entry[2]
            if turn.held_out:
                return None
            if turn.kv_need <= self._fleet.room():
                continue  # There is room, but the policy lets this turn and smaller ones wait.
            if not turn.preemption_failed:
                if preempted := self._held_out.to_preempt(turn, reserved_for):
                    return turn, preempted
                reserved_for = min(reserved_for, turn.kv_need)
                self._fleet.reserve_all(reserved_for)
            if following := self._lanes[name].first(turn.kv_need - 1, entry)[0]:
                heappush(heads, (following, name))
        return None

    def _assign_waiting(self, at: float, tick: bool = False) -> list[AbortTurn | AssignTurn]:
        """Assign waiting turns in order, or reserve for them the workers that the policy asked for.

        A few running turns may move. At a tick, these are the turns after the last tick's, which
        may move to any worker. Otherwise the first turns may move to the worker that got free.
        """
        self._fleet.begin_round()
        actions: list[AbortTurn | AssignTurn] = []
        waiting: dict[Hashable, int] = {}  # lane -> number of its turns that found no worker
        heads = self._heads(self._fleet.largest_turn())
        running = self._candidates(tick) if self.may_move(tick) else []
        freed = "" if tick else self._freed
        self._freed = ""
        while heads or running:
            while running and (not heads or running[-1] < heads[0][0]):
                actions += self._move(running.pop()[2], freed, at)
            if not heads:
                break
            entry, name = heappop(heads)
            turn, lane, bound = entry[2], self._lanes[name], UNBOUNDED
            if turn.kv_need > self._fleet.room():
                following = self._skip_large(lane, entry)
            else:
                if assigned := self._place(turn, at):
                    actions.append(assigned)
                elif self._closed():
                    continue
                else:
                    waiting[name] = waiting.get(name, 0) + 1
                    bound = turn.kv_need - 1 if self._has_lanes else UNBOUNDED
                following = self._following(lane, bound, entry)
            if following and waiting.get(name, 0) < LOOK_AHEAD:
                heappush(heads, (following, name))
        return actions

    def _candidates(self, tick: bool) -> list[Entry]:
        """Return the running turns that the policy is asked to move, in reverse order."""
        if not tick:
            return self._watched.next_entries(ASKED_WHEN_FREED)[::-1]
        found = self._watched.next_entries(ASKED_AT_TICK, self._last_asked)
        # After the last turn, the next tick begins with the first turn again.
        self._last_asked = found[-1] if len(found) == ASKED_AT_TICK else None
        return found[::-1]

    def _move(self, turn: TurnState, freed: str, at: float) -> list[AbortTurn | AssignTurn]:
        """Move the turn if the policy prefers another worker: `freed` or, if that is "", any."""
        self._fleet.begin_turn()
        among = [self._fleet.get(freed, turn)] if freed else self._fleet.least_of_each(turn)
        worker = self._better(turn, among, at, self._cluster) if among != [None] else None
        if worker is None:
            return []
        old = self._cluster.workers[turn.worker]
        abort = AbortTurn(turn.turn, old.worker, turn.attempt, "slow")
        self._watched.remove(turn)
        old.free(turn)
        self._fleet.changed(old.worker)
        turn.moves += 1
        return [abort, self._assign(turn, worker, at)]

    def _following(self, lane: TurnQueue, bound: int, after: Entry) -> Entry | None:
        """Return the lane's next turn that needs at most `bound` KV tokens and could find a worker,
        or reserve one."""
        largest = self._fleet.largest_turn() if lane else 0
        return lane.first(min(bound, largest), after)[0] if largest > 0 else None

    def _skip_large(self, lane: TurnQueue, entry: Entry) -> Entry | None:
        """Skip turns that need more room than any worker has; return the lane's next smaller turn.
        The workers that could hold a skipped turn are reserved for it."""
        self._fleet.reserve_all(entry[2].kv_need)
        if self._fleet.largest_turn() <= 0:
            return None
        following, passed = lane.first(self._fleet.room(), entry)
        self._fleet.reserve_all(passed)
        return following

    def _heads(self, need: int) -> list[tuple[Entry, Hashable]]:
        """Return a heap of the lanes: (first turn that needs at most `need` KV tokens, lane)."""
        if need <= 0:
            return []
        heads = [
            (head, name) for name, lane in self._lanes.items() if (head := lane.first(need)[0])
        ]
        heapify(heads)
        return heads

    def _place(self, turn: TurnState, at: float) -> AssignTurn | None:
        """Assign a waiting turn; if no worker is chosen, reserve workers for it."""
        self._fleet.begin_turn()
        worker = self._held_out.borrowed(turn) if turn.held_out else None
        worker = worker or self._choose(turn, self._fleet, self._cluster)
        if worker is None:
            self._fleet.reserve(turn)
            return None
        self.remove(turn)
        return self._assign(turn, worker, at)

    def _assign(self, turn: TurnState, worker: WorkerState, at: float) -> AssignTurn:
        turn.worker, turn.assigned_at, turn.progress_at = worker.worker, at, at
        turn.attempt += 1
        turn.preemption_failed = False
        worker.hold(turn)
        if turn.held_out:
            self._held_out.add(turn)
        self._fleet.changed(worker.worker)
        self._settle_home(turn, worker)
        if (
            turn.moves < MAX_MOVES
            and not turn.held_out
            and self._better is not None
            and self._watches(worker)
        ):
            self._watched.add(turn, self._key(turn))
        chunk = self._chunk(turn, worker)
        if chunk >= turn.max_new_tokens - turn.made_tokens:
            chunk = 0  # no limit besides the turn's own
        return AssignTurn(turn.turn, worker.worker, turn.attempt, chunk)

    def _settle_home(self, turn: TurnState, worker: WorkerState) -> None:
        """Note that the trajectory's prefix is cached on the worker (its home), and its group's
        prompt, if the group has no home yet."""
        home, workers = self._cluster.home, self._cluster.workers
        old = home.get(turn.trajectory)
        if old != worker.worker:
            if old in workers:
                workers[old].cached.pop(turn.trajectory, None)
            home[turn.trajectory] = worker.worker
            worker.cached[turn.trajectory] = None
        if turn.group not in self._cluster.group_home:
            self._cluster.group_home[turn.group] = worker.worker
            worker.cached[turn.group] = None
