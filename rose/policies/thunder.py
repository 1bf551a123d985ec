"""ThunderAgent (arXiv 2602.13692): of trajectories whose KV exceeds the memory some wait whole."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from rose.scheduler.events import Event, Tick, TrajectoryEnded, TurnEnded, WorkerJoined, WorkerLost
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState

BUFFER = 100  # KV tokens kept for each active program's next ones (its code: BUFFER_PER_PROGRAM)


@dataclass(slots=True)
class _Program:
    """A trajectory that is active or paused."""

    worker: str = ""  # that it is active on; "": it is paused
    tokens: int = 0  # its context, as last known
    counted: float = 0.0  # KV tokens of the worker's that are not given to others
    acting_since: float = 0.0  # when its last turn ended
    marked: bool = False  # to be paused at the end of its turn


class Thunder:
    """A trajectory is a program with a context of c tokens, and it is active on one worker or
    paused (ThunderAgent, arXiv 2602.13692, section 4; github.com/ThunderAgent-org/ThunderAgent,
    scheduler/router.py). An active one has all of its turns there, and its c counts against that
    worker's KV memory while its tools run as well: so its prefix is still cached when they are
    done. A paused one holds nothing that counts, its cache is evicted as others need the room, and
    its next turn waits. No engine is told to pin or to evict: the bound on active programs and the
    engine's own least-recently-used order do it, live as in the simulator.

    Restore: a waiting turn of a paused or new program makes it active on the worker with the most
    room, if c and BUFFER fit there, wherever it was before; `shortest_first` is the order. For this
    a program whose tools have run for t seconds counts with c 2^(-t / half_life_s) only: room held
    for long tools is given away (the authors' decay, half_life_s=1). Pause: every `period_s` (their
    5 s), where the contexts without decay exceed a worker's memory, programs whose tools run are
    paused, those of the smallest c first (what is computed again costs c^2), and then those that
    generate are marked, to be paused when their turn ends.

    Ours: a program is restored at the event that makes room, not at the next period; one whose
    tools run isn't restored before it asks; a turn's whole limit is reserved on the worker that it
    is sent to, as by every policy here, where theirs relies on the engine's preemption; and what
    waits for one of a worker's `max_sequences` waits here, not in the engine. Environments before
    memory (their section 4.4) are what every policy has: one starts when its group is admitted, not
    before, and its trajectory asks for a worker once it stands. Live: nothing is missing.
    """

    def __init__(self, period_s: float, half_life_s: float) -> None:
        if not (period_s > 0 and half_life_s > 0):
            raise ValueError(f"period_s={period_s:g}, half_life_s={half_life_s:g}: seconds above 0")
        self.period_s, self.half_life_s = period_s, half_life_s
        self._programs: dict[str, _Program] = {}
        self._active: dict[str, dict[str, _Program]] = {}  # worker -> trajectory -> program
        self._room: dict[str, float] = {}  # worker -> KV tokens that no program counts for
        self._looked_at = -math.inf

    def on_event(self, event: Event, cluster: Cluster) -> None:
        match event:
            case Tick(at=at) if not 0 <= at - self._looked_at < self.period_s:
                self._looked_at = at
                self._look(at, cluster)
            case TurnEnded(at=at, turn=name, tokens=tokens):
                self._acts(cluster.turns[name], tokens, at)
            case TrajectoryEnded(trajectory=trajectory):
                self._pause(trajectory)
                self._programs.pop(trajectory, None)
            case WorkerJoined(worker=worker) | WorkerLost(worker=worker):
                self._pause_all(worker)
                self._room.pop(worker, None)

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        if turn.held_out:
            return fleet.least(turn)
        program = self._programs.setdefault(turn.trajectory, _Program())
        if program.worker and not _can_serve(cluster.workers[program.worker], turn):
            self._pause(turn.trajectory)
        if program.worker:
            worker = fleet.get(program.worker, turn)
        elif (worker := self._roomiest(turn, fleet)) is not None:
            program.worker = worker.worker
            self._active.setdefault(worker.worker, {})[turn.trajectory] = program
        if worker is not None:
            self._count(program, _context(turn))
        return worker

    def lane(self, turn: TurnState) -> str:
        """A turn that waits for the worker of its program holds up none that may go elsewhere."""
        program = self._programs.get(turn.trajectory)
        return "held_out" if turn.held_out else program.worker if program is not None else ""

    # ----------------------------------------------------------------- restore, pause

    def _roomiest(self, turn: TurnState, fleet: Fleet) -> WorkerState | None:
        """The worker with most room of those that the program fits on; one without programs takes
        any, or the largest would never run."""
        room = {w.worker: self._room.setdefault(w.worker, w.kv_tokens) for w in fleet}
        need = _context(turn) + BUFFER
        for name in sorted(room, key=lambda name: (-room[name], name)):
            if room[name] < need and self._active.get(name):
                continue
            if (worker := fleet.get(name, turn)) is not None:
                return worker
        return None

    def _acts(self, turn: TurnState, tokens: int, at: float) -> None:
        """The turn is over: tools run."""
        program = self._programs.get(turn.trajectory)
        if program is not None and program.worker:
            program.acting_since = at
            self._count(program, turn.context_tokens + tokens)
            if program.marked:
                self._pause(turn.trajectory)

    def _count(self, program: _Program, tokens: int, share: float = 1.0) -> None:
        """An active program's context, and the share of it that counts."""
        counted = tokens * share + BUFFER
        self._room[program.worker] -= counted - program.counted
        program.tokens, program.counted = tokens, counted

    def _pause(self, trajectory: str) -> None:
        program = self._programs.get(trajectory)
        if program is not None and program.worker:
            self._room[program.worker] += program.counted
            del self._active[program.worker][trajectory]
            program.worker, program.counted, program.marked = "", 0.0, False

    def _pause_all(self, worker: str) -> None:
        for trajectory in list(self._active.get(worker, ())):
            self._pause(trajectory)

    # ----------------------------------------------------------------- every period

    def _look(self, at: float, cluster: Cluster) -> None:
        """Count the contexts anew, and pause what is too much."""
        turns = {turn.trajectory: turn for turn in cluster.turns.values()}
        for name, active in self._active.items():
            if not active:
                continue
            worker = cluster.workers[name]
            self._room[name] = worker.kv_tokens - sum(p.counted for p in active.values())
            for trajectory, program in active.items():
                if (turn := turns.get(trajectory)) is not None:
                    self._count(program, _context(turn))
                else:
                    acted_s = max(0.0, at - program.acting_since)
                    self._count(program, program.tokens, 2 ** (-acted_s / self.half_life_s))
            self._make_fit(worker.kv_tokens, active, turns.keys())

    def _make_fit(
        self, kv_tokens: int, active: dict[str, _Program], generating: Collection[str]
    ) -> None:
        over = sum(p.tokens + BUFFER for p in active.values() if not p.marked) - kv_tokens
        smallest = sorted(active, key=lambda t: (t in generating, active[t].tokens, t))
        for trajectory in smallest:
            program = active[trajectory]
            if over <= 0:
                return
            if not program.marked:
                over -= program.tokens + BUFFER
                program.marked = True
                if trajectory not in generating:
                    self._pause(trajectory)


def _can_serve(worker: WorkerState, turn: TurnState) -> bool:
    """Now or later, by what is known."""
    leaves = worker.draining or worker.resting or worker.worker == turn.avoid
    return not leaves and turn.kv_need <= worker.largest_turn


def _context(turn: TurnState) -> int:
    """Tokens, what is made of the turn included."""
    return turn.context_tokens + turn.made_tokens


class ShortestFirst:
    """Of the waiting turns, those of trajectories that have begun, then the others; of each the
    smallest context first, then by arrival (ThunderAgent, arXiv 2602.13692, equation 10: what is
    restored first). Nothing starves within a step, which has finitely many turns; theirs restores
    after 30 minutes whatever the room. With other routing than `thunder` no program is paused, and
    this is the order of what waits for a place."""

    def __init__(self) -> None:
        self._begun: set[str] = set()  # trajectories that have had a turn

    def key(self, turn: TurnState, cluster: Cluster) -> tuple[bool, int]:
        return turn.trajectory not in self._begun, _context(turn)

    def on_event(self, event: Event, cluster: Cluster) -> None:
        match event:
            case TurnEnded(turn=name):
                self._begun.add(cluster.turns[name].trajectory)
            case TrajectoryEnded(trajectory=trajectory):
                self._begun.discard(trajectory)
