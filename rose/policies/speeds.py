"""What routing policies that look ahead share: how fast workers are, and how long turns."""

from __future__ import annotations

from dataclasses import dataclass

from rose.scheduler.events import (
    Event,
    StepBegun,
    TrajectoryEnded,
    TurnEnded,
    TurnReturned,
    WorkerJoined,
    WorkerLost,
)
from rose.scheduler.state import Cluster, TurnState, WorkerState

RECENT_TURNS = 200  # turns of a domain, or trajectories, over which a mean is taken
# of a domain: mean output, and turns that it was taken over; all domains together
UNKNOWN, ALL = ((0.0, 0), None)


class Lengths:
    """`final`: mean context of a trajectory at its end, tokens; 0: none has ended."""

    def __init__(self) -> None:
        self.final = 0.0
        self._context: dict[str, int] = {}  # trajectory -> its context so far, tokens
        self._output: dict[
            str | None, tuple[float, int]
        ] = {}  # domain -> mean output of a turn, and their number

    def on_event(self, event: Event, cluster: Cluster) -> None:
        match event:
            case TurnEnded(turn=name, tokens=tokens) if tokens:
                turn = cluster.turns[name]
                self._context[turn.trajectory] = turn.context_tokens + tokens
                for domain in (turn.domain, ALL):
                    mean, count = self._output.get(domain, UNKNOWN)
                    self._output[domain] = (
                        mean + (tokens - mean) / min(count + 1, RECENT_TURNS),
                        count + 1,
                    )
            case TrajectoryEnded(trajectory=trajectory, tokens=tokens):
                final = self._context.pop(trajectory, 0)
                if tokens and final:
                    self.final += (final - self.final) / (RECENT_TURNS if self.final else 1)

    def of_domain(self, turn: TurnState) -> float:
        """Mean output of its domain's turns, tokens; 0 before one has ended."""
        return self._output.get(turn.domain, UNKNOWN)[0]

    def of_any(self, turn: TurnState) -> float:
        """The same, or that of all domains before one of its own has ended."""
        return (self._output.get(turn.domain) or self._output.get(ALL, UNKNOWN))[0]


# weight of an observation one turn older, of a pool's some thousand turns per step: a few hundred
# count
FORGET = 0.995
# What no observation varies would be forgotten without end.
# variance of a coefficient, in units of the residual's, beyond which nothing more is forgotten
LARGEST = 1e6
FEW_TOKENS = 4  # of an attempt, fewer say nothing about its pace
# of a decode step, what prefill of a token takes at most: it reads the weights once for many
PREFILL = 0.02
RECENT = 0.2  # weight of a worker's newest turn in its own slowness

Features = tuple[float, float, float]


@dataclass(slots=True)
class Sent:
    """An attempt as it was sent."""

    worker: str
    attempt: int
    context: int  # tokens
    held: int  # tokens of context of all turns on the worker, with it
    uncached: int  # tokens of context
    made: int  # tokens of the turn, by earlier attempts


class Speeds:
    """A turn's seconds on a worker: a x output + b x output x held + c x uncached context, with
    `held` the context of all turns there, mean of the attempt's begin and end (a decode step reads
    the weights and the KV of every sequence; prefill goes by its tokens). The coefficients are
    fitted per pool of like workers (kind and hardware) by recursive least squares over the attempts
    that ended. A worker's own slowness, which on borrowed GPUs is mostly the online server's
    compute, is the recent mean of its turns' measured seconds over the fitted ones."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, str], LeastSquares] = {}
        self._slowness: dict[str, float] = {}
        self._sent: dict[str, Sent] = {}
        self._held: dict[str, int] = {}  # worker -> tokens of context

    def on_event(self, event: Event, cluster: Cluster) -> None:
        match event:
            case TurnReturned(at=at, turn=name, chunk=True):
                turn = cluster.turns[name]
                self.ended(turn, cluster.workers.get(turn.worker or ""), at, turn.made_tokens)
            case TurnEnded(at=at, turn=name, tokens=tokens):
                turn = cluster.turns[name]
                self.ended(turn, cluster.workers.get(turn.worker or ""), at, tokens)
            case WorkerJoined(worker=worker) | WorkerLost(worker=worker):
                self.forget(worker)
            case StepBegun():
                self.step_begun()

    def sent(self, turn: TurnState, worker: WorkerState, cached: bool) -> None:
        """Also anew, without an end: its worker rests, was lost or gave it back."""
        self._leave(turn)
        context = uncached(turn)
        held = self._held[worker.worker] = self._held.get(worker.worker, 0) + context
        self._sent[turn.turn] = Sent(
            worker.worker,
            turn.attempt + 1,
            context,
            held,
            0 if cached else context,
            turn.made_tokens,
        )

    def ended(self, turn: TurnState, worker: WorkerState | None, at: float, made: int) -> None:
        """Learns from an attempt that went to its end; `made`: tokens of the turn until then."""
        held = self._held.get(turn.worker or "", 0)
        sent = self._leave(turn)
        if (
            sent is None
            or worker is None
            or (worker.worker, turn.attempt) != (sent.worker, sent.attempt)
        ):
            return
        tokens = made - sent.made
        if tokens <= 0:
            return
        sort = worker.kind, worker.hardware
        pool = self._pools.get(sort)
        seconds, x = at - turn.assigned_at, features(tokens, (sent.held + held) / 2, sent.uncached)
        if pool is None:
            pool = self._pools[sort] = self._like_another(x, seconds)
        fitted = pool.put(x, seconds)
        old = self._slowness.get(worker.worker, 1.0)
        self._slowness[worker.worker] = (
            old + RECENT * (seconds / fitted - old) if fitted > 0 else old
        )

    def _like_another(self, x: Features, seconds: float) -> LeastSquares:
        """A new pool begins as one that is known, slower or faster as its first attempt was: one
        attempt can't tell decode from prefill."""
        known = next((pool for pool in self._pools.values() if pool.of(x) > 0), None)
        return LeastSquares(
            FORGET, *([w * seconds / known.of(x) for w in known.weights] if known else ())
        )

    def moved(self, turn: TurnState, worker: WorkerState) -> None:
        """Learns from an attempt that is cut off now, up to the last word of it."""
        self.ended(turn, worker, turn.progress_at, turn.made_tokens)

    def token_s(self, turn: TurnState) -> float | None:
        """Seconds per token of the attempt that runs, as measured; None: too few have come."""
        sent = self._sent.get(turn.turn)
        tokens = turn.made_tokens - sent.made if sent is not None else 0
        return (turn.progress_at - turn.assigned_at) / tokens if tokens >= FEW_TOKENS else None

    def knows(self, worker: WorkerState) -> bool:
        """Whether an attempt went to its end there."""
        return worker.worker in self._slowness

    def _leave(self, turn: TurnState) -> Sent | None:
        sent = self._sent.pop(turn.turn, None)
        if sent is not None:
            self._held[sent.worker] -= sent.context
        return sent

    def forget(self, worker: str) -> None:
        self._slowness.pop(worker, None)

    def step_begun(self) -> None:
        """One that was slow for a while is tried again."""
        self._slowness = {worker: (1 + slow) / 2 for worker, slow in self._slowness.items()}

    def seconds(
        self, turn: TurnState, worker: WorkerState, output: float, cached: bool
    ) -> float | None:
        """Of the turn's next `output` tokens there, and as much again as it delays those that are
        there: each of its decode steps is longer by their contexts, and each of theirs by its own,
        about as long. So the sum of all turns falls, not just this one's. None: no worker like it
        has been measured."""
        pool = self._pools.get((worker.kind, worker.hardware))
        return None if pool is None else self._of(pool, turn, worker, output, cached, 2)

    def joining_s(
        self, turn: TurnState, worker: WorkerState, output: float, twice: bool
    ) -> float | None:
        """Of the turn's next `output` tokens there, where nothing of it is cached, and the time for
        which the others wait for its prefill; `twice`: and as much again as its decode steps delay
        theirs, as in `seconds`. Where contexts are alike the fit takes waiting for prefill: that is
        at most PREFILL decode steps a token."""
        pool = self._pools.get((worker.kind, worker.hardware))
        if pool is None:
            return None
        decode, _, prefill = pool.weights
        prefill_s = min(max(prefill, 0.0), PREFILL * max(decode, 0.0)) * uncached(turn) / 1e3
        return self._of(pool, turn, worker, output, True, 1 + twice) + prefill_s * (
            1 + len(worker.turns)
        ) * self._slowness.get(worker.worker, 1.0)

    def staying_s(self, turn: TurnState, worker: WorkerState, output: float) -> float:
        """Of the turn's next `output` tokens where it runs; 0 where no worker like it has been
        measured."""
        pool = self._pools.get((worker.kind, worker.hardware))
        return 0.0 if pool is None else self._of(pool, turn, worker, output, True, 1)

    def _of(
        self,
        pool: LeastSquares,
        turn: TurnState,
        worker: WorkerState,
        output: float,
        cached: bool,
        times: int,
    ) -> float:
        context = uncached(turn)
        held = times * self._held.get(worker.worker, 0) + context
        seconds = pool.of(features(output, held, 0 if cached else context))
        return max(seconds, 0.0) * self._slowness.get(worker.worker, 1.0)


def uncached(turn: TurnState) -> int:
    return turn.context_tokens + turn.made_tokens


def features(output: float, held: float, uncached: int) -> Features:
    """Tokens, in thousands and, where two are multiplied, in millions."""
    return output / 1e3, output * held / 1e6, uncached / 1e3


class LeastSquares:
    """Recursive least squares with exponential forgetting: y = w . x with three coefficients, in
    plain floats and written out, as it runs once per turn."""

    def __init__(self, forget: float, w0: float = 0.0, w1: float = 0.0, w2: float = 0.0) -> None:
        self._forget = forget
        self._w = w0, w1, w2
        self._p = (1e3, 0.0, 0.0, 1e3, 0.0, 1e3)  # upper triangle; a weak pull to 0

    @property
    def weights(self) -> Features:
        return self._w

    def of(self, x: Features) -> float:
        w = self._w
        return w[0] * x[0] + w[1] * x[1] + w[2] * x[2]

    def put(self, x: Features, y: float) -> float:
        """Returns what was expected before."""
        x0, x1, x2 = x
        w0, w1, w2 = self._w
        p00, p01, p02, p11, p12, p22 = self._p
        g0, g1, g2 = (
            p00 * x0 + p01 * x1 + p02 * x2,
            p01 * x0 + p11 * x1 + p12 * x2,
            p02 * x0 + p12 * x1 + p22 * x2,
        )
        forget = self._forget if p00 < LARGEST and p11 < LARGEST and p22 < LARGEST else 1.0
        scale, expected = forget + x0 * g0 + x1 * g1 + x2 * g2, w0 * x0 + w1 * x1 + w2 * x2
        error = (y - expected) / scale
        w = self._w = w0 + g0 * error, w1 + g1 * error, w2 + g2 * error
        self._p = (
            (p00 - g0 * g0 / scale) / forget,
            (p01 - g0 * g1 / scale) / forget,
            (p02 - g0 * g2 / scale) / forget,
            (p11 - g1 * g1 / scale) / forget,
            (p12 - g1 * g2 / scale) / forget,
            (p22 - g2 * g2 / scale) / forget,
        )
        if w[0] < 0 or w[1] < 0 or w[2] < 0:
            self._w = project(w, self._p)
        return expected


def project(w: Features, p: tuple[float, ...]) -> Features:
    """The best fit without negative coefficients, but for those that are 0 by then: each negative
    one is set to 0, and the others as fits best to that, by the covariances `p`."""
    columns = (p[0], p[1], p[2]), (p[1], p[3], p[4]), (p[2], p[4], p[5])
    for i in range(3):
        if w[i] < 0:
            by = w[i] / columns[i][i]
            w = tuple(0.0 if j == i else w[j] - by * columns[i][j] for j in range(3))
    return tuple(max(one, 0.0) for one in w)
