"""Waiting turns, and running ones that may go elsewhere, and the rounds in which they find workers.

What a round costs doesn't grow with the turns that wait. Policies are asked about turns that a
worker has room for; of these LOOK_AHEAD of each lane may find no place. Turns that need more than
any worker's room are passed over together; the workers that could hold the smallest of them are
kept, whatever their kind.

A running turn that the policy watches stands in line at its old place as well: when a worker gets
free that is worth moving to, it is asked about before turns that came later. So a turn on a slow
worker loses nothing against one that waited.

Turns of evaluations (`TurnState.held_out`) are never in the way of training: they come after all
others, go to borrowed workers first, and where a training turn finds no place they give way, back
to the queue with the tokens that they have.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Any

from rose.scheduler.events import AbortTurn, AssignTurn, Event
from rose.scheduler.fleet import Fleet
from rose.scheduler.held_out import HeldOut
from rose.scheduler.policies import Order, Routing, optional
from rose.scheduler.state import FREE, UNBOUNDED, Cluster, TurnState, WorkerState
from rose.scheduler.turn_queue import Entry, TurnQueue

# turns of a lane that may find no place before the others of the lane aren't asked about either
LOOK_AHEAD = 32
MAX_MOVES = 2  # of one turn that is slow where it is
# running turns that are asked about when a worker that is not watched gets free, at a tick
LOOKS, TICK_LOOKS = (1, 32)


class Dispatch:
    def __init__(self, cluster: Cluster, fleet: Fleet, routing: Routing, order: Order) -> None:
        self._cluster, self._fleet, self._order = cluster, fleet, order
        self._choose = routing.choose
        self._chunk = optional(routing, "chunk", lambda turn, worker: 0)
        self._kv_need = optional(routing, "kv_need", lambda turn: turn.whole_kv_need)
        self._has_lanes = hasattr(routing, "lane")
        self._lane = optional(routing, "lane", lambda turn: "")
        self._changed = optional(order, "changed", None)
        self._watches = optional(routing, "watches", lambda worker: False)
        self._better = optional(routing, "better", None)
        self._closed = optional(routing, "closed", lambda: False)
        self._watched = TurnQueue()  # running turns that may move
        self._held_out = HeldOut(cluster, fleet)  # running turns of evaluations
        self._waiting_held_out = 0
        self._looked: Entry | None = None  # the last that a tick looked at
        self._freed = ""  # a worker that is not watched, and has lost a turn since the last round
        self._lanes: dict[Hashable, TurnQueue] = {}  # none of them empty

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

    def take_back(self, turn: TurnState) -> None:
        """Into the queue, in its old place."""
        self.left(turn)
        self._cluster.workers[turn.worker].free(turn)
        self._fleet.changed(turn.worker)
        turn.worker = None
        self.add(turn)

    def reorder(self, event: Event) -> None:
        """New places for the turns whose keys the event has changed."""
        for name in self._changed(event, self._cluster) if self._changed else ():
            turn = self._cluster.turns.get(name)
            if turn is not None and turn.worker is None:
                self.remove(turn)
                self.add(turn)

    def left(self, turn: TurnState) -> None:
        """Its worker has it no more."""
        if turn.held_out:
            self._held_out.remove(turn)
        if turn.turn in self._watched:
            self._watched.remove(turn)
        elif not self._watches(self._cluster.workers[turn.worker]):
            self._freed = turn.worker

    def looks(self, tick: bool) -> bool:
        """Whether a round would ask about running turns."""
        return len(self._watched) > 0 and (tick or self._freed != "")

    def round(self, at: float, tick: bool = False) -> list[AbortTurn | AssignTurn]:
        """Turns that find a place now, in order, after those that make way for one."""
        actions = self._round(at, tick)
        while found := self._makes_way():
            turn, given = found
            for other in given:
                actions.append(AbortTurn(other.turn, other.worker, other.attempt, "training"))
                self.take_back(other)
            actions += self._round(at)
            turn.vain = turn.worker is None
        return actions

    def _makes_way(self) -> tuple[TurnState, list[TurnState]] | None:
        """The first training turn that no worker has room for, and evaluation turns whose end gives
        it some. One that these can't help, or that they made way for in vain, holds up none of
        smaller need; but workers that can hold it are kept for it, as in any round."""
        if not self._held_out or self._cluster.waiting == self._waiting_held_out:
            return None
        self._fleet.begin_round()
        heads, kept = self._heads(UNBOUNDED), FREE
        while heads:
            entry, name = heappop(heads)
            turn = entry[2]
            if turn.held_out:
                return None
            if turn.kv_need <= self._fleet.room():
                continue  # the policy lets it wait, and those of smaller need
            if not turn.vain:
                if given := self._held_out.in_the_way(turn, kept):
                    return turn, given
                kept = min(kept, turn.kv_need)
                self._fleet.keep_all(kept)
            if following := self._lanes[name].first(turn.kv_need - 1, entry)[0]:
                heappush(heads, (following, name))
        return None

    def _round(self, at: float, tick: bool = False) -> list[AbortTurn | AssignTurn]:
        """One that finds no place keeps what it asked for. A few running ones are asked about too:
        the first, for a worker that got free, or at a tick those after the last tick's, for
        any."""
        self._fleet.begin_round()
        actions: list[AbortTurn | AssignTurn] = []
        waiting: dict[Hashable, int] = {}  # lane -> turns of it that the policy let wait
        heads = self._heads(self._fleet.holds())
        running, freed = (
            self._candidates(tick) if self.looks(tick) else [],
            "" if tick else self._freed,
        )
        self._freed = ""
        while heads or running:
            while running and (not heads or running[-1] < heads[0][0]):
                actions += self._move(running.pop()[2], freed, at)
            if not heads:
                break
            entry, name = heappop(heads)
            turn, lane, bound = entry[2], self._lanes[name], UNBOUNDED
            if turn.kv_need > self._fleet.room():
                following = self._pass_over(lane, entry)
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
        """Running turns to ask about, the first one last."""
        if not tick:
            return self._watched.some(LOOKS)[::-1]
        found = self._watched.some(TICK_LOOKS, self._looked)
        self._looked = found[-1] if len(found) == TICK_LOOKS else None  # then from the first again
        return found[::-1]

    def _move(self, turn: TurnState, freed: str, at: float) -> list[AbortTurn | AssignTurn]:
        """To a worker where it ends sooner, if the policy knows one: `freed`, or any."""
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
        """The lane's next turn that may find a place, or keep a worker."""
        holds = self._fleet.holds() if lane else 0
        return lane.first(min(bound, holds), after)[0] if holds > 0 else None

    def _pass_over(self, lane: TurnQueue, entry: Entry) -> Entry | None:
        """Nobody has room for this turn, nor for those behind it that need as much: they keep who
        could hold them."""
        self._fleet.keep_all(entry[2].kv_need)
        if self._fleet.holds() <= 0:
            return None
        following, passed = lane.first(self._fleet.room(), entry)
        self._fleet.keep_all(passed)
        return following

    def _heads(self, holds: int) -> list[tuple[Entry, Hashable]]:
        """Of each lane the first turn that may find a place, a heap."""
        if holds <= 0:
            return []
        heads = [
            (head, name) for name, lane in self._lanes.items() if (head := lane.first(holds)[0])
        ]
        heapify(heads)
        return heads

    def _place(self, turn: TurnState, at: float) -> AssignTurn | None:
        self._fleet.begin_turn()
        worker = self._held_out.borrowed(turn) if turn.held_out else None
        worker = worker or self._choose(turn, self._fleet, self._cluster)
        if worker is None:
            self._fleet.keep(turn)
            return None
        self.remove(turn)
        return self._assign(turn, worker, at)

    def _assign(self, turn: TurnState, worker: WorkerState, at: float) -> AssignTurn:
        turn.worker, turn.assigned_at, turn.progress_at = worker.worker, at, at
        turn.attempt += 1
        turn.vain = False
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
        return AssignTurn(
            turn.turn,
            worker.worker,
            turn.attempt,
            chunk if chunk < turn.max_new_tokens - turn.made_tokens else 0,
        )

    def _settle_home(self, turn: TurnState, worker: WorkerState) -> None:
        """Its prefix is cached where it runs, its group's prompt where the first of the group
        ran."""
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
