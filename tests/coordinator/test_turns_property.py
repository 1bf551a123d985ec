"""Whatever workers do, no turn is lost and no token is counted twice: random losses, returns,
stalls, late words."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rose import protocol as p
from rose.coordinator.journal import replay
from rose.scheduler import events as ev
from tests.coordinator.conftest import RANK, TURN_TIMEOUT_S, World, scheduler

PROMPT, NEW = [1, 2, 3], 6
WORKERS = list(RANK)
WHOLE_KV, SEQUENCES = 4 * (len(PROMPT) + NEW), 3
WEIGHTS = {"request": 3, "progress": 3, "finish": 2, "give back": 3, "capacity": 3}
WEIGHTS |= dict.fromkeys(["late word", "die", "join", "stall", "cancel"], 1)
STEPS = st.tuples(
    st.sampled_from([what for what, weight in WEIGHTS.items() for _ in range(weight)]),
    st.sampled_from(WORKERS),
    st.integers(0, 7),
    st.integers(0, 4),
)


@dataclass
class Attempt:
    worker: str
    number: int
    made: int  # tokens of the turn when it began, and since


class Engines:
    """Token servers whose i-th token of turn n is 10 n + i: a token lost, or there twice, shows in
    the result."""

    def __init__(self, folder, workers):
        self.world, self.workers = World(folder), WORKERS[-workers:]
        self.held: dict[str, Attempt] = {}
        self.over: list[tuple[str, Attempt]] = []  # of which late words may come
        self.asked, self.cancelled, self.results = 0, set(), {}
        self.counted = {worker: 0 for worker in WORKERS}  # tokens that count
        self.incarnation = dict.fromkeys(WORKERS, 0)
        self.up, self.stalls = set(), 0
        self.world.hub.weights.publish(0, "v0/manifest.json")
        for worker in self.workers:
            self.join(worker)

    def name(self, n):
        return f"g0.{n}.t0"

    def look(self):
        """Take what the hub sent."""
        for rank, m in self.world.taken(p.AbortTurn):
            attempt = self.held.pop(m.turn)
            assert (RANK[attempt.worker], attempt.number) == (rank, m.attempt)
            self.over.append((m.turn, attempt))
        for rank, m in self.world.taken(p.GenerateTurn):
            worker = next(w for w in WORKERS if RANK[w] == rank)
            assert worker in self.up and m.turn not in self.held, "a turn is with one worker"
            made = len(m.tokens) // 4 - len(PROMPT)
            assert p.unpack_tokens(m.tokens).tolist() == PROMPT + self.tokens(m.turn, 0, made)
            assert m.sampling.max_new_tokens == NEW - made > 0, "a complete turn is closed"
            self.held[m.turn] = Attempt(worker, m.attempt, made)
        for _, m in self.world.taken(p.TurnResult):
            assert m.turn not in self.results and m.turn not in self.cancelled
            self.results[m.turn] = p.unpack_tokens(m.tokens).tolist()

    def tokens(self, turn, low, high):
        return [10 * int(turn.split(".")[1]) + i for i in range(low, high)]

    def speak(self, say, turn, attempt, count):
        """`say` with the next `count` tokens of the turn."""
        tokens = self.tokens(turn, attempt.made, attempt.made + count)
        attempt.made += count
        say(tokens, attempt=attempt.number, turn=turn, rank=RANK[attempt.worker])
        return len(tokens)

    def join(self, worker):
        self.incarnation[worker] += 1
        self.up.add(worker)
        ready = p.WorkerReady(worker, self.incarnation[worker], 4242, SEQUENCES, WHOLE_KV, 0)
        self.world.hub.handle(RANK[worker], ready)

    def capacity(self, worker, kv=WHOLE_KV, sequences=SEQUENCES):
        self.world.capacity(worker, kv, sequences, self.incarnation[worker], revoked=kv < WHOLE_KV)

    def step(self, what, worker, pick, count):
        mine = sorted(turn for turn, attempt in self.held.items() if attempt.worker == worker)
        turn = mine[pick % len(mine)] if mine else None
        match what:
            case "request":
                self.world.request(self.name(self.asked), NEW)
                self.asked += 1
            case "progress" | "finish" | "give back" if turn is not None:
                attempt = self.held[turn]
                count = min(count, NEW - attempt.made)
                if what == "progress":
                    self.counted[worker] += self.speak(self.world.progress, turn, attempt, count)
                else:
                    del self.held[turn]
                    self.over.append((turn, attempt))
                    at_least = int(what == "finish" and attempt.made == 0)
                    say = self.world.finish if what == "finish" else self.world.give_back
                    self.counted[worker] += self.speak(say, turn, attempt, max(count, at_least))
            case "capacity" if worker in self.up:
                self.capacity(worker, kv=pick * WHOLE_KV // 7, sequences=count)
            case "late word" if self.over:
                turn, attempt = self.over[pick % len(self.over)]
                say = (self.world.progress, self.world.finish, self.world.give_back)[count % 3]
                self.speak(say, turn, Attempt(attempt.worker, attempt.number, attempt.made), 1)
            case "die" if worker in self.up:
                self.up.discard(worker)
                self.over += [(turn, self.held.pop(turn)) for turn in mine]
                self.leave(worker)
            case "join" if worker not in self.up:
                self.join(worker)
            case "stall" if self.stalls < 4:  # the fifth would end the run
                self.stalls += 1
                self.world.hub.feed(ev.Tick(at=time.time() + TURN_TIMEOUT_S + 1))
            case "cancel" if self.asked:
                n = pick % self.asked
                if self.name(n) not in self.results:
                    self.cancelled.add(self.name(n))
                self.world.hub.cancel(f"g0.{n}")
        self.look()

    def leave(self, worker):
        if worker.startswith("borrowed"):
            self.world.hub.lose(worker, "silent")
        else:
            self.world.down(worker, self.incarnation[worker])

    def end(self):
        """Every worker is there and takes its whole; they finish what they get."""
        for worker in self.workers:
            if worker not in self.up:
                self.join(worker)
            self.capacity(worker)
            self.look()
        while self.held:
            self.step("finish", next(iter(self.held.values())).worker, 0, 0)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, len(WORKERS)), st.lists(STEPS, max_size=60))
def test_no_turn_is_lost_and_every_token_counts_once(workers, steps):
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(Path(folder), workers)
        for what, worker, *rest in steps:
            engines.step(what, engines.workers[WORKERS.index(worker) % workers], *rest)
        engines.end()
        hub, cluster = engines.world.hub, engines.world.scheduler.cluster
        found = set(engines.results)
        assert found == {engines.name(n) for n in range(engines.asked)} - engines.cancelled
        for turn, tokens in engines.results.items():
            assert 1 <= len(tokens) <= NEW and tokens == engines.tokens(turn, 0, len(tokens))
        assert len(hub.ledger) == 0 and cluster.turns == {} and engines.world.actions == []
        assert all(w.open_turns == 0 for w in hub.workers.values())
        assert all(w.turns == {} and w.accepts_turns for w in cluster.workers.values())
        assert hub.workers.step_tokens == sum(engines.counted.values())
        engines.world.journal.close()
        assert replay(engines.world.journal_path, scheduler()) > 0
