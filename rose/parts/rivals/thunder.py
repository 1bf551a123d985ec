"""ThunderAgent (arXiv 2602.13692): pauses whole trajectories when their KV exceeds the memory."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from rose.scheduler.events import Event, Tick, TrajectoryEnded, TurnEnded, WorkerJoined, WorkerLost
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState

# KV tokens reserved for growth of each active program (BUFFER_PER_PROGRAM of the authors' code)
BUFFER = 100


@dataclass(slots=True)
class _Program:
    """A trajectory that is active or paused."""

    worker: str = ""  # worker on which it is active; "" if it is paused
    tokens: int = 0  # last known context
    counted: float = 0.0  # KV tokens of the worker that count as taken
    acting_since: float = 0.0  # time at which its last turn ended
    marked: bool = False  # True if it is to be paused at the end of its turn


class Thunder:
    """Program-aware routing (ThunderAgent, arXiv 2602.13692, section 4;
    github.com/ThunderAgent-org/ThunderAgent, scheduler/router.py).

    A trajectory is a program with a context of c tokens, active on one worker or paused. An active
    program has all its turns on its worker, and c counts against the worker's KV memory while its
    tools run, too, so that its prefix is still cached afterwards. A paused program doesn't count,
    and its next turn waits. Engines aren't asked to pin or evict: the bound on active programs and
    the engine's own least-recently-used order suffice, live and simulated.

    Restore: a waiting turn of a paused or new program makes it active on the worker with the most
    room, if c + BUFFER fits. `shortest_first` is the matching order. Here, a program whose tools
    have run for t seconds counts only c 2^(-t / half_life_s) (the authors' decay, half_life_s=1),
    so that long tools don't hold room.
    Pause: every `period_s` (the authors' 5 s), the contexts without decay are compared with a
    worker's memory. While they exceed it, programs whose tools run are paused, smallest c first,
    because computing a context again costs c^2. If that isn't enough, generating programs are
    marked to be paused after their turn.

    Differences, ours:
    1. A program is restored at the event that makes room, not at the next period, and not while its
       tools run.
    2. A turn's whole limit is reserved on its worker, as by every policy here. The authors rely on
       the engine's preemption.
    3. A turn that exceeds a worker's `max_sequences` waits in our queue, not in the engine.
    Their section 4.4 prepares environments before memory. That holds with every policy here: an
    environment starts when its group is admitted, and the trajectory requests a worker once the
    environment is ready. Live runs support all of it.
    """

    def __init__(self, period_s: float, half_life_s: float) -> None:
        if not (period_s > 0 and half_life_s > 0):
            raise ValueError(f"period_s={period_s:g}, half_life_s={half_life_s:g}: seconds above 0")
        self.period_s, self.half_life_s = period_s, half_life_s
        self._programs: dict[str, _Program] = {}
        self._active: dict[str, dict[str, _Program]] = {}  # worker -> trajectory -> program
        self._room: dict[str, float] = {}  # worker -> KV tokens that no program takes
        self._recounted_at = -math.inf

    def on_event(self, event: Event, cluster: Cluster) -> None:
        match event:
            case Tick(at=at) if not 0 <= at - self._recounted_at < self.period_s:
                self._recounted_at = at
                self._recount(at, cluster)
            case TurnEnded(at=at, turn=name, tokens=tokens):
                self._tools_run(cluster.turns[name], tokens, at)
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
        """Return "held_out" for an evaluation, else the worker on which the turn's program is
        active, "" if none. So turns that wait for one worker don't block other turns."""
        program = self._programs.get(turn.trajectory)
        return "held_out" if turn.held_out else program.worker if program is not None else ""

    # ----------------------------------------------------------------- restore, pause

    def _roomiest(self, turn: TurnState, fleet: Fleet) -> WorkerState | None:
        """Return the worker with the most room among those that the program fits on. A worker
        without programs accepts any, because the largest program would never run otherwise."""
        room = {w.worker: self._room.setdefault(w.worker, w.kv_tokens) for w in fleet}
        need = _context(turn) + BUFFER
        for name in sorted(room, key=lambda name: (-room[name], name)):
            if room[name] < need and self._active.get(name):
                continue
            if (worker := fleet.get(name, turn)) is not None:
                return worker
        return None

    def _tools_run(self, turn: TurnState, tokens: int, at: float) -> None:
        """Note that the turn has ended and the program's tools run."""
        program = self._programs.get(turn.trajectory)
        if program is not None and program.worker:
            program.acting_since = at
            self._count(program, turn.context_tokens + tokens)
            if program.marked:
                self._pause(turn.trajectory)

    def _count(self, program: _Program, tokens: int, share: float = 1.0) -> None:
        """Set an active program's context to `tokens`, of which the share `share` counts."""
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

    def _recount(self, at: float, cluster: Cluster) -> None:
        """Count all contexts again, and pause programs that exceed a worker's memory."""
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
        """Pause or mark programs until the other programs fit into the worker's memory."""
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
    """True if the worker can take the turn now or later, as far as is known."""
    leaves = worker.draining or worker.resting or worker.worker == turn.avoid
    return not leaves and turn.kv_need <= worker.largest_turn


def _context(turn: TurnState) -> int:
    """Return the tokens of context, those generated in the turn included."""
    return turn.context_tokens + turn.made_tokens


class ShortestFirst:
    """Turns of started trajectories first, then the others; in both, smallest context first, ties
    by arrival (ThunderAgent, arXiv 2602.13692, equation 10, the order of restoring).

    Nothing starves within a step, which has finitely many turns; the authors restore any program
    after 30 minutes. With routing other than `thunder` no program is paused, and the order applies
    to turns that wait for a worker.
    """

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
