"""Predictions for routing policies: how fast workers are, and how long turns are."""

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

# An exponential mean over turns of a domain, or over trajectories, covers about this many.
RECENT_TURNS = 200
UNKNOWN = (0.0, 0)  # (mean output, number of turns) before a turn has ended
ALL = None  # key of all domains together


class Lengths:
    """Mean lengths of turns and trajectories."""

    def __init__(self) -> None:
        self.final = 0.0  # mean tokens of context at a trajectory's end; 0 until one has ended
        self._context: dict[str, int] = {}  # trajectory -> tokens of its context so far
        # Domain -> (mean output of a turn in tokens, number of turns)
        self._output: dict[str | None, tuple[float, int]] = {}

    def on_event(self, event: Event, cluster: Cluster) -> None:
        match event:
            case TurnEnded(turn=name, tokens=tokens) if tokens:
                turn = cluster.turns[name]
                self._context[turn.trajectory] = turn.context_tokens + tokens
                for domain in (turn.domain, ALL):
                    mean, count = self._output.get(domain, UNKNOWN)
                    mean += (tokens - mean) / min(count + 1, RECENT_TURNS)
                    self._output[domain] = mean, count + 1
            case TrajectoryEnded(trajectory=trajectory, tokens=tokens):
                final = self._context.pop(trajectory, 0)
                if tokens and final:
                    self.final += (final - self.final) / (RECENT_TURNS if self.final else 1)

    def of_domain(self, turn: TurnState) -> float:
        """Return the mean output of the turn's domain in tokens; 0 before a turn has ended."""
        return self._output.get(turn.domain, UNKNOWN)[0]

    def of_any(self, turn: TurnState) -> float:
        """Return the mean output of the turn's domain, or of all domains before it has one."""
        return (self._output.get(turn.domain) or self._output.get(ALL, UNKNOWN))[0]


# Forgetting factor of a pool's fit, per turn: the last few hundred turns count.
FORGET = 0.995
# Nothing is forgotten while a coefficient's variance exceeds this multiple of the residual's.
# Otherwise the variance would grow without bound for a feature that doesn't vary.
LARGEST = 1e6
FEW_TOKENS = 4  # fewest tokens of an attempt from which its pace is measured
# Largest plausible time to prefill a token, as a share of a decode step. Prefill reads the weights
# once for many tokens.
PREFILL = 0.02
RECENT = 0.2  # weight of a worker's newest turn in the mean of its slowness

Features = tuple[float, float, float]


@dataclass(slots=True)
class Sent:
    """State at the beginning of an attempt."""

    worker: str
    attempt: int
    context: int  # tokens of context
    held: int  # tokens of context of all turns on the worker, this one included
    uncached: int  # tokens of context that aren't in the worker's prefix cache
    made: int  # tokens of the turn that earlier attempts generated


class Speeds:
    """Prediction of the seconds that a turn takes on a worker.

        seconds = slowness x (a x output + b x output x held + c x uncached context)

    `held` is the context of all turns on the worker, the mean of the attempt's beginning and end.
    A decode step reads the weights (a) and the KV of every sequence (b); prefill takes time per
    token (c). The coefficients are fitted per pool, the workers of one kind and hardware, by
    recursive least squares over the attempts that ended. A worker's slowness is the recent mean of
    measured over fitted seconds; on borrowed GPUs it is mostly due to the online server's load.
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[str, str], LeastSquares] = {}  # (kind, hardware) -> fit
        self._slowness: dict[str, float] = {}  # worker -> measured over fitted seconds
        self._sent: dict[str, Sent] = {}  # turn -> its running attempt
        self._held: dict[str, int] = {}  # worker -> tokens of context of its turns

    def on_event(self, event: Event, cluster: Cluster) -> None:
        match event:
            case TurnReturned(at=at, turn=name, chunk=True):
                turn = cluster.turns[name]
                self.ended(turn, cluster.workers.get(turn.worker or ""), at, turn.made_tokens)
            case TurnEnded(at=at, turn=name, tokens=tokens):
                turn = cluster.turns[name]
                self.ended(turn, cluster.workers.get(turn.worker or ""), at, tokens)
            case WorkerJoined(worker=worker) | WorkerLost(worker=worker):
                self._slowness.pop(worker, None)
            case StepBegun():  # Halve the deviations from 1, so that slow workers are tried again.
                self._slowness = {name: (1 + slow) / 2 for name, slow in self._slowness.items()}

    def sent(self, turn: TurnState, worker: WorkerState, cached: bool) -> None:
        """Record that an attempt begins. Forget the turn's earlier attempt if it hasn't ended: its
        worker rested, was lost or returned the turn."""
        self._forget_turn(turn)
        context = uncached(turn)
        held = self._held[worker.worker] = self._held.get(worker.worker, 0) + context
        missing, made = 0 if cached else context, turn.made_tokens
        self._sent[turn.turn] = Sent(worker.worker, turn.attempt + 1, context, held, missing, made)

    def ended(self, turn: TurnState, worker: WorkerState | None, at: float, made: int) -> None:
        """Learn from an attempt that ended. `made` are the tokens of the turn at its end."""
        held = self._held.get(turn.worker or "", 0)
        sent = self._forget_turn(turn)
        if sent is None or worker is None:
            return
        tokens = made - sent.made
        if tokens <= 0 or (worker.worker, turn.attempt) != (sent.worker, sent.attempt):
            return
        sort = worker.kind, worker.hardware
        pool = self._pools.get(sort)
        seconds, x = at - turn.assigned_at, features(tokens, (sent.held + held) / 2, sent.uncached)
        if pool is None:
            pool = self._pools[sort] = self._like_another(x, seconds)
        fitted = pool.update(x, seconds)
        old = self._slowness.get(worker.worker, 1.0)
        measured = seconds / fitted if fitted > 0 else old
        self._slowness[worker.worker] = old + RECENT * (measured - old)

    def _like_another(self, x: Features, seconds: float) -> LeastSquares:
        """Return the first fit of a new pool: the fit of a known pool, scaled to predict the new
        pool's first attempt. A single attempt can't separate decode from prefill."""
        known = next((pool for pool in self._pools.values() if pool.predict(x) > 0), None)
        return LeastSquares(
            *([w * seconds / known.predict(x) for w in known.weights] if known else ())
        )

    def token_s(self, turn: TurnState) -> float | None:
        """Return the running attempt's measured seconds per token; None below FEW_TOKENS."""
        sent = self._sent.get(turn.turn)
        tokens = turn.made_tokens - sent.made if sent is not None else 0
        return (turn.progress_at - turn.assigned_at) / tokens if tokens >= FEW_TOKENS else None

    def has_measured(self, worker: WorkerState) -> bool:
        """True if an attempt has ended on the worker."""
        return worker.worker in self._slowness

    def _forget_turn(self, turn: TurnState) -> Sent | None:
        """Remove and return the turn's running attempt; None if it has none."""
        sent = self._sent.pop(turn.turn, None)
        if sent is not None:
            self._held[sent.worker] -= sent.context
        return sent

    def seconds(
        self, turn: TurnState, worker: WorkerState, output: float, cached: bool
    ) -> float | None:
        """Return the seconds of the turn's next `output` tokens on the worker, plus the delay of
        the turns there; None if the worker's pool hasn't been measured.

        The contexts of the other turns make each decode step of this turn longer, and its context
        makes their steps longer by about as much. Counting both minimizes the sum over all turns.
        """
        pool = self._pools.get((worker.kind, worker.hardware))
        return None if pool is None else self._predict(pool, turn, worker, output, cached, 2)

    def joining_s(
        self, turn: TurnState, worker: WorkerState, output: float, twice: bool
    ) -> float | None:
        """Return the seconds of the turn's prefill and next `output` tokens on another worker; None
        as in `seconds`. The time for which the turns there wait for the prefill is added.

        `twice` also adds the delay by the turn's decode steps, as in `seconds`. Prefill of a token
        counts as at most PREFILL decode steps, because the fit may count waiting as prefill.
        """
        pool = self._pools.get((worker.kind, worker.hardware))
        if pool is None:
            return None
        decode, _, prefill = pool.weights
        prefill_s = min(max(prefill, 0.0), PREFILL * max(decode, 0.0)) * uncached(turn) / 1e3
        return self._predict(pool, turn, worker, output, True, 1 + twice) + prefill_s * (
            1 + len(worker.turns)
        ) * self._slowness.get(worker.worker, 1.0)

    def staying_s(self, turn: TurnState, worker: WorkerState, output: float) -> float:
        """Return the seconds of the turn's next `output` tokens on the worker that it runs on; 0 if
        the worker's pool hasn't been measured."""
        pool = self._pools.get((worker.kind, worker.hardware))
        return 0.0 if pool is None else self._predict(pool, turn, worker, output, True, 1)

    def _predict(
        self,
        pool: LeastSquares,
        turn: TurnState,
        worker: WorkerState,
        output: float,
        cached: bool,
        times: int,
    ) -> float:
        """Return the seconds by the fit; the contexts of the worker's turns count `times` times."""
        context = uncached(turn)
        held = times * self._held.get(worker.worker, 0) + context
        seconds = pool.predict(features(output, held, 0 if cached else context))
        return max(seconds, 0.0) * self._slowness.get(worker.worker, 1.0)


def uncached(turn: TurnState) -> int:
    """Return the tokens to prefill on a worker that has none of them cached."""
    return turn.context_tokens + turn.made_tokens


def features(output: float, held: float, uncached: int) -> Features:
    """Return the features of a fit: tokens in thousands, products of tokens in millions."""
    return output / 1e3, output * held / 1e6, uncached / 1e3


class LeastSquares:
    """Recursive least squares with exponential forgetting: y = w . x with three coefficients. It
    runs once per turn, so it is written out in plain floats for speed."""

    def __init__(self, w0: float = 0.0, w1: float = 0.0, w2: float = 0.0) -> None:
        self.weights: Features = w0, w1, w2
        # Upper triangle of the covariances; large variances pull the coefficients weakly to 0.
        self._p = (1e3, 0.0, 0.0, 1e3, 0.0, 1e3)

    def predict(self, x: Features) -> float:
        w = self.weights
        return w[0] * x[0] + w[1] * x[1] + w[2] * x[2]

    def update(self, x: Features, y: float) -> float:
        """Add an observation, and return the prediction before it."""
        x0, x1, x2 = x
        w0, w1, w2 = self.weights
        p00, p01, p02, p11, p12, p22 = self._p
        g0 = p00 * x0 + p01 * x1 + p02 * x2
        g1 = p01 * x0 + p11 * x1 + p12 * x2
        g2 = p02 * x0 + p12 * x1 + p22 * x2
        forget = FORGET if p00 < LARGEST and p11 < LARGEST and p22 < LARGEST else 1.0
        scale, expected = forget + x0 * g0 + x1 * g1 + x2 * g2, w0 * x0 + w1 * x1 + w2 * x2
        error = (y - expected) / scale
        w = self.weights = w0 + g0 * error, w1 + g1 * error, w2 + g2 * error
        self._p = (
            (p00 - g0 * g0 / scale) / forget,
            (p01 - g0 * g1 / scale) / forget,
            (p02 - g0 * g2 / scale) / forget,
            (p11 - g1 * g1 / scale) / forget,
            (p12 - g1 * g2 / scale) / forget,
            (p22 - g2 * g2 / scale) / forget,
        )
        if w[0] < 0 or w[1] < 0 or w[2] < 0:
            self.weights = project(w, self._p)
        return expected


def project(w: Features, p: tuple[float, ...]) -> Features:
    """Return coefficients without negative ones, close to the best fit under that constraint.

    The negative coefficients are set to 0 one after the other. After each, the covariances `p` give
    the best fit of the other coefficients under this constraint.
    """
    columns = (p[0], p[1], p[2]), (p[1], p[3], p[4]), (p[2], p[4], p[5])
    for i in range(3):
        if w[i] < 0:
            by = w[i] / columns[i][i]
            w = tuple(0.0 if j == i else w[j] - by * columns[i][j] for j in range(3))
    return tuple(max(one, 0.0) for one in w)
