"""A coordinator's world in one process: an environment host, a trainer and engines that answer in
any order, by a seed.

Words of one rank stay in order, as MPI keeps them; whose word comes next is drawn. The trainer is
slow: while others have something to say its word is rarely the next, so that rollouts may go on
while it trains. What a word says of weights is decided when it is heard: a version may come in the
middle of a turn.

Where devices are shared, a rank holds its device from the order on, and until its answer is heard:
never both roles. Hybrid engines (rollout.hybrid) on CPUs share it with nobody, and are asleep while
the trainer trains.
"""

import asyncio
import random
from collections import Counter, deque
from pathlib import Path
from unittest import mock

import pytest

from rose import protocol as p
from rose.coordinator import checkpoints, journal
from rose.coordinator.coordinator import Coordinator, Stopped
from rose.launch.layout import hybrid_ranks, layout
from rose.observe.metrics import read_metrics, rows_of
from rose.observe.recorder import NullRecorder
from rose.policies import build
from rose.protocol import seed_of
from rose.trainer import checkpoint

# Four groups of two in a step, and only the files that these tests read.
SHORT = "trainer.batch_size=8 rollout.group_size=2 serving.borrow=false"
SHORT += " observe.tensorboard=false observe.save_trajectories=false"
TRAINER_SPEAKS = 0.01  # of the draws
PROMPT = "prompt"  # what such a word of the trainer's is about: it is no slower than others
LOADED = "loaded"  # what an engine's word of new weights is about
TOKENS_OF_A_TURN = 5
DEADLINE_S = 120.0


class Peers:
    """The coordinator's mailbox, and everybody at its other end."""

    rank = 0

    def __init__(self, config, seed, step=0, hardware="cpu"):
        self.config, self.draw, self.step = config, random.Random(seed), step
        ranks = layout(config)
        self.size = len(ranks)
        self.hardware = hardware  # of every engine, or a list of each one's
        self.role = {rank.rank: rank for rank in ranks}
        # to be heard: functions that give a message, or None
        self.words = {rank.rank: deque() for rank in ranks[1:]}
        self.version = {rank.rank: -1 for rank in ranks if rank.role is p.Role.ROLLOUT}
        self.running = {}  # trajectory -> its start, turns left, its Trajectory so far
        self.host_of = {}  # running trajectory -> rank
        self.left = {}  # trajectory that was released -> as `running`: its snapshot
        self.deaf = {}  # host that was lost -> answers that it waits for
        self.made = Counter()  # turn -> tokens that engines have sent of it
        self.received = {}  # trajectory -> tokens of its turns
        self.trained = {}  # step -> [trajectory]
        self.begun, self.rounds = set(), 0  # steps; rounds of them before their last
        self.seed_of_group = {}
        self.domain_of_group = {}
        self.turns_in_training = 0  # of training groups, begun while the trainer trained
        self.training = False
        trainers = {rank.rank for rank in ranks if rank.role is p.Role.TRAINER}
        self.hybrids = set(hybrid_ranks(config).values())
        in_turn = set(self.version) if config.shares_devices else self.hybrids
        # who has a device in turn, and has it now
        self.in_turn = in_turn | trainers if config.trainer_sleeps else in_turn
        self.awake = trainers if config.trainer_sleeps else set(self.hybrids)
        self.waiting = {}  # rank -> turns that wait in a hybrid engine until it wakes
        self.of_hybrids = Counter()  # turns that these got, and that moved on
        self.orders = []  # (role, its name), where devices are shared
        self.turns_asleep = 0  # that engines got
        self.late = {}  # rank -> LoadVersion that waits for its turn
        self.incarnation = {}  # of engines
        self.dead = set()  # engines that died asleep
        self.look = lambda: None  # called at every message to a peer
        for rank in ranks[1:]:
            at = rank.rank
            self.say(at, p.Hello(at, rank.role, rank.index, 4242, "host"))
            if rank.role is p.Role.ENVIRONMENT:
                self.say(at, p.HostReady(at))
            elif rank.role is p.Role.TRAINER:
                self.say(at, p.TrainerReady(rank.index, step, step, "store", "it shares nothing"))
            elif at in in_turn and config.trainer_sleeps:
                # The engine is not up yet: the first turn of its rank on the device starts it.
                self.dead.add(at)
            elif rank.role is p.Role.ROLLOUT:
                self.incarnation[at] = 1
                self.say(at, self.ready(rank, 1))

    # ----------------------------------------------------------------- the mailbox

    async def receive(self):
        while True:
            await asyncio.sleep(0)
            ready = [rank for rank, words in self.words.items() if words]
            if not ready:
                await asyncio.sleep(0.001)
                continue
            rank = self.draw.choice(ready)
            slow = self.role[rank].role is p.Role.TRAINER and self.words[rank][0][0] is not PROMPT
            if slow and len(ready) > 1 and self.draw.random() > TRAINER_SPEAKS:
                continue
            message = self.words[rank].popleft()[1]()
            if isinstance(message, p.TurnProgress | p.TurnFinished):
                self.made[message.turn] += len(message.tokens) // 4
            if message is not None:
                return rank, message

    def send(self, rank, message):
        getattr(self, f"_{type(message).__name__}")(rank, message)
        self.look()

    def say(self, rank, message, about=None):
        self.words[rank].append((about, message if callable(message) else lambda: message))

    def ready(self, rank, incarnation):
        hardware = self.hardware if isinstance(self.hardware, str) else self.hardware[rank.index]
        return p.WorkerReady(f"rollout-{rank.index}", incarnation, 4242, 4, 10_000, -1, hardware)

    # ----------------------------------------------------------------- a shared device

    def _Wake(self, rank, m):
        self.awake.add(rank)
        roles = {self.role[r].role for r in self.awake}
        assert len(roles) == 1, "trainer and engines are awake at once"
        self.orders.append((self.role[rank].role, "wake"))
        if rank in self.dead:
            self.dead.discard(rank)
            self.starts(rank)
        elif rank in self.late:
            self._LoadVersion(rank, self.late.pop(rank))
        self.say(rank, p.DeviceChanged(rank, m.turn, True, 0.2, 3.0, 1.0, 24.0))
        for turn in self.waiting.pop(rank, []):
            self._GenerateTurn(rank, turn)

    def _Sleep(self, rank, m):
        def slept():
            self.awake.discard(rank)
            return p.DeviceChanged(rank, m.turn, False, 0.1, 3.0, 20.0, 24.0)

        self.orders.append((self.role[rank].role, "sleep"))
        self.say(rank, slept, PROMPT if self.role[rank].role is p.Role.TRAINER else None)

    def dies(self, rank):
        """The engine of a rank, now; another starts at once unless it is the trainer's turn."""
        self.words[rank] = deque(word for word in self.words[rank] if word[0] is None)
        self.waiting.pop(rank, None)
        name = f"rollout-{self.role[rank].index}"
        self.say(rank, p.WorkerDown(name, self.incarnation[rank], "killed", True))
        if self.asleep(rank):
            self.dead.add(rank)
        else:
            self.starts(rank)

    def starts(self, rank):
        self.incarnation[rank] = self.incarnation.get(rank, 0) + 1
        self.version[rank] = -1
        self.late.pop(rank, None)
        self.say(rank, self.ready(self.role[rank], self.incarnation[rank]))

    # ----------------------------------------------------------------- environment host

    def loses_host(self, rank):
        """The process of an environment host: of what it was about to say only a part has left."""
        for name in [name for name in self.running if self.host_of[name] == rank]:
            del self.running[name]
        for _ in range(self.draw.randint(0, len(self.words[rank]))):
            self.words[rank].pop()
        self.deaf[rank] = self.deaf.get(rank, 0) + 1
        self.say(rank, p.HostLost(rank, "killed by SIGKILL"))

    def _HostForgotten(self, rank, m):
        self.deaf[rank] -= 1
        if not self.deaf[rank]:
            self.say(rank, p.HostReady(rank))

    def _StartTrajectory(self, rank, m):
        if self.deaf.get(rank):
            return
        self.host_of[m.id] = rank
        self.seed_of_group.setdefault(m.group, m.env_seed)
        assert self.domain_of_group.setdefault(m.group, m.domain) == m.domain
        assert self.seed_of_group[m.group] == m.env_seed and m.id not in self.running
        self.running[m.id] = self.left.pop(m.id, None) or [m, 1 + seed_of(m.id) % 3, [], []]
        if turns := len(self.running[m.id][2]):
            tokens = turns * TOKENS_OF_A_TURN
            self.say(rank, p.TrajectoryResumed(m.id, turns, tokens, False), m.id)
        self.ask(rank, m.id)

    def ask(self, rank, name):
        start, _, tokens, _ = self.running[name]
        turn = f"{name}.t{len(tokens)}"
        context, sampling = p.pack_tokens([1] * 8) + b"".join(tokens), p.Sampling(TOKENS_OF_A_TURN)
        whose = (turn, name, start.group, start.phase)
        self.say(rank, p.TurnRequest(*whose, context, sampling, start.domain), name)

    def _TurnResult(self, rank, m):
        name = m.turn.rpartition(".")[0]
        if self.deaf.get(rank) or name not in self.running:
            return
        assert self.host_of[name] == rank
        start, turns, tokens, versions = self.running[name]
        tokens.append(m.tokens)
        self.received[name] = b"".join(tokens)
        versions.append(m.versions)
        if len(tokens) < turns:
            self.ask(rank, name)
        else:
            del self.running[name]
            ended = self.trajectory(start, b"".join(tokens), b"".join(versions))
            self.say(rank, p.TrajectoryFinished(ended), name)

    def trajectory(self, start, tokens, versions):
        made = len(tokens) // 4
        reward = float(seed_of(start.id, "reward") % 2)
        packed = (p.pack_tokens([1]) + tokens, b"\0" + b"\1" * made)
        packed += (p.pack_floats([-1.0] * (made + 1)), p.pack_tokens([-1]) + versions)
        ends = {"turns": 1, "response_tokens": made, "domain": start.domain}
        whose = (start.id, start.group, start.phase)
        return p.Trajectory(*whose, *packed, reward, reward > 0, **ends)

    def _ReleaseTrajectory(self, rank, m):
        """When the host has nothing to say about it, so that it waits for a turn."""

        def leave():
            if self.host_of.get(m.id) != rank or m.id not in self.running:
                return None
            if any(word[0] == m.id for word in self.words[rank]) or self.deaf.get(rank):
                self.say(rank, leave)  # what it has to say comes first
                return None
            self.left[m.id] = self.running.pop(m.id)
            return p.TrajectoryReleased(rank, m.id)

        self.say(rank, leave)

    def _CancelTrajectory(self, rank, m):
        self.running.pop(m.id, None)  # a last word of it may be on its way

    # ----------------------------------------------------------------- engines

    def _GenerateTurn(self, rank, m):
        if self.asleep(rank):
            self.turns_asleep += rank not in self.hybrids
            self.waiting.setdefault(rank, []).append(m)
            return
        self.of_hybrids["turns"] += rank in self.hybrids
        self.turns_in_training += self.training and m.turn.startswith("g")
        count = m.sampling.max_new_tokens
        about = (m.turn, m.attempt)

        def made(n):
            tokens = [self.draw.randrange(2, 10**6) for _ in range(n)]
            return p.pack_tokens(tokens), p.pack_floats([-1.0] * n)

        def end():
            return p.TurnFinished(*about, *last, self.version[rank], finish)

        first, last, finish = made(1), made(count - 1), p.FinishReason.STOP
        if count > 1:
            self.say(rank, lambda: p.TurnProgress(*about, *first, self.version[rank]), about)
        else:
            last, finish = first, p.FinishReason.LENGTH
        self.say(rank, end, about)

    def asleep(self, rank):
        return rank in self.in_turn and rank not in self.awake

    def _AbortTurn(self, rank, m):
        waiting = self.waiting.get(rank, [])
        waiting[:] = [t for t in waiting if (t.turn, t.attempt) != (m.turn, m.attempt)]
        self.of_hybrids["moved"] += rank in self.hybrids
        kept = [word for word in self.words[rank] if word[0] != (m.turn, m.attempt)]
        self.words[rank] = deque(kept)

    def _LoadVersion(self, rank, m):
        def load():
            self.version[rank] = m.version
            name = f"rollout-{self.role[rank].index}"
            return p.VersionLoaded(name, self.incarnation.get(rank, 1), m.version, 0.1, 0.01, 10)

        if self.asleep(rank):
            self.late[rank] = m
            return
        self.words[rank].insert(self.draw.randint(0, len(self.words[rank])), (LOADED, load))

    # ----------------------------------------------------------------- trainer

    def _TrainStep(self, rank, m):
        assert not self.asleep(rank) and not self.awake & self.hybrids
        assert m.step == self.step + 1, "a step is trained once"
        self.training, self.ahead = not m.more, m.more
        rows = self.trained.setdefault(m.step, []) if m.step in self.begun else []
        self.trained[m.step] = rows
        self.begun.add(m.step)
        new = sorted(row for update in m.micro_batches for batch in update for row in batch)
        assert new == list(range(len(rows), len(m.summary.rewards))), "each row comes once"

    def _TrainPart(self, rank, m):
        rows = dict(zip(m.indices, m.trajectories, strict=True))
        self.trained[m.step] += [rows[index] for index in sorted(rows)]
        if self.ahead:
            self.rounds += 1
            self.say(rank, p.TrainedAhead(m.step, 0))
            return

        def done():
            self.training, self.step = False, m.step
            return p.TrainDone(m.step, 0, m.step, {"loss": 0.5}, "store")

        self.say(rank, done)

    def _SaveCheckpoint(self, rank, m):
        assert not self.asleep(rank)
        checkpoint.mark(Path(m.folder), 0, "")


def run(
    config,
    folder,
    attempt=1,
    seed=0,
    resume_from=None,
    stop_when=lambda coordinator: False,
    hardware="cpu",
    watch=lambda coordinator: None,
):
    """A coordinator among peers, to its end or until `stop_when`; both of them afterwards. It is
    asked at every message to a peer and at every turn of the loop: what lasts for less than a turn
    is seen, too. `watch` is called at the latter alone."""

    async def scene():
        step = checkpoint.step_of(resume_from) if resume_from else 0
        peers = Peers(config, seed, step, hardware)
        coordinator = Coordinator(config, folder, attempt, peers, NullRecorder(), resume_from)

        def look():
            if not coordinator.ending.asked.is_set() and stop_when(coordinator):
                coordinator.ending.asked.set()

        async def watching():
            while not coordinator.ending.asked.is_set():
                look()
                watch(coordinator)
                await asyncio.sleep(0)

        peers.look = look
        watcher = asyncio.create_task(watching())
        try:
            await asyncio.wait_for(coordinator.run(), DEADLINE_S)
        finally:
            watcher.cancel()
        return coordinator, peers

    with mock.patch.object(checkpoints, "POLL_S", 0.001):  # seconds; these ranks save at once
        return asyncio.run(scene())


def stopped(config, folder, when, seed=0):
    """The newest checkpoint of a run that is stopped once `when(coordinator)` holds."""
    with pytest.raises(Stopped):
        run(config, folder, seed=seed, stop_when=when)
    return checkpoint.latest(folder)


def rows(folder, kind="step"):
    """The run's rows of this kind."""
    return rows_of(read_metrics(folder), kind)


def entries(folder, attempt=1):
    """The journal of an attempt: events with the actions that the scheduler took."""
    return list(journal.read(folder / f"journal/attempt-{attempt:03d}.jsonl"))[1:]


def check_replay(config, folder):
    """The journal of a run's first attempt leads another scheduler to the same actions."""
    made = build(config.scheduler, config.rollout.turn_timeout_s)
    assert journal.replay(folder / "journal/attempt-001.jsonl", made) > 100
