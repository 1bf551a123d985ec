"""A turn hub on a real scheduler and journal; only what it sends to other ranks is kept in a
list."""

import pytest

from rose import protocol as p
from rose.coordinator.groups import Rollouts
from rose.coordinator.journal import Journal
from rose.coordinator.turn_log import TurnLog
from rose.coordinator.turns import TurnHub
from rose.observe.recorder import NullRecorder
from tests import made
from tests.scheduler.said import built

TURN_TIMEOUT_S = 60.0
HOST = 1
HOSTS = (1, 2)  # ranks of the environment hosts of `rollouts`
RANK = {"rollout-0": 10, "rollout-1": 11, "borrowed-1": 100}


def scheduler(routing="least_loaded"):
    return built(TURN_TIMEOUT_S, routing=routing)


def packed(tokens):
    return p.pack_tokens(tokens), p.pack_floats([-1.0] * len(tokens))


def tokens(message):
    return p.unpack_tokens(message.tokens).tolist()


def request(turn="g0.0.t0", tokens=(1, 2, 3), new=10, seed=None):
    """A turn GROUP.MEMBER.tN is wanted."""
    whose, group = turn.rpartition(".")[0], turn.partition(".")[0]
    context = p.pack_tokens(tokens)
    return p.TurnRequest(turn, whose, group, p.Phase.TRAIN, context, p.Sampling(new, seed=seed))


def trajectory(name, reward=1.0, response=2, version=3, **more):
    """A trajectory with a prompt of one token and a response of one version."""
    tokens, n = [version] * response, response + 1
    parts = ([0, *tokens], [0] + [1] * response, [0.0] * n, [-1, *tokens], reward)
    return made.trajectory(name, *parts, success=reward > 0, **{"turns": 2} | more)


class World:
    """The hub and everything around it; `sent` are (rank, message), `actions` those about groups
    and batches."""

    def __init__(self, folder, routing="least_loaded", hybrids=()):
        self.sent, self.actions, self.faults = [], [], []
        self.journal_path = folder / "journal" / "attempt-001.jsonl"
        self.scheduler = scheduler(routing)
        self.journal = Journal(self.journal_path, self.scheduler.snapshot())
        notes = (self.journal, NullRecorder(), self.actions.append, self.fault, 100)
        log = TurnLog(folder / "turns", 0, 0)
        self.hub = TurnHub(self.scheduler, self.send, *notes, log=log, hybrids=hybrids)

    def send(self, rank, message):
        self.sent.append((rank, message))

    def fault(self, what, detail):
        self.faults.append((what, detail))

    def ready(self, worker, incarnation=1, version=0, sequences=4):
        word = p.WorkerReady(worker, incarnation, 4242, sequences, 10_000, version)
        self.hub.handle(RANK[worker], word)

    def down(self, worker, incarnation=1, restarting=True):
        self.hub.handle(RANK[worker], p.WorkerDown(worker, incarnation, "killed", restarting))

    def request(self, turn="g0.0.t0", new=10, seed=5):
        self.hub.handle(HOST, request(turn, new=new, seed=seed))

    def progress(self, tokens, attempt=1, turn="g0.0.t0", rank=10):
        self.hub.handle(rank, p.TurnProgress(turn, attempt, *packed(tokens), 0))

    def finish(self, tokens, attempt=1, turn="g0.0.t0", rank=10, finish=p.FinishReason.STOP):
        self.hub.handle(rank, p.TurnFinished(turn, attempt, *packed(tokens), 0, finish))

    def give_back(self, tokens, attempt=1, turn="g0.0.t0", rank=10):
        self.hub.handle(rank, p.TurnReturned(turn, attempt, *packed(tokens), 0, "evicted"))

    def capacity(self, worker, kv=10_000, sequences=4, incarnation=1, revoked=False):
        word = p.WorkerCapacity(worker, incarnation, kv, sequences, -1.0, revoked)
        self.hub.handle(RANK[worker], word)

    def taken(self, kind):
        """(rank, message) of this kind sent so far; forgets them."""
        found = [(rank, m) for rank, m in self.sent if isinstance(m, kind)]
        self.sent[:] = [(rank, m) for rank, m in self.sent if not isinstance(m, kind)]
        return found


def of_hosts(config, world, hosts):
    """The rollouts on environment hosts of these ranks."""
    return Rollouts(config, world.hub, world.send, dict(enumerate(hosts)), world.fault)


def started(world):
    """The host of each trajectory that was started since this was last asked."""
    return {m.id: rank for rank, m in world.taken(p.StartTrajectory)}


def begun(rollouts, world):
    """The host of g0.0, of the only group."""
    rollouts.admit(0, "g0", 0.0)
    return started(world)["g0.0"]


def ask(world, host, turn, tokens=(1, 2, 3)):
    world.hub.handle(host, request(turn, tokens))


def lose(rollouts, host, ready=True):
    rollouts.handle(p.HostLost(host, "killed by SIGKILL"))
    if ready:
        rollouts.handle(p.HostReady(host))


@pytest.fixture
def world(tmp_path):
    """One worker, rollout-0, with the newest weights."""
    world = World(tmp_path)
    world.hub.weights.publish(0, "v0/manifest.json")
    world.ready("rollout-0")
    yield world
    world.journal.close()


@pytest.fixture
def rollouts(world, make_config):
    """On two environment hosts that are up, with an engine."""
    config = make_config("rollout.group_size=2 trainer.batch_size=8 rollout.environment_hosts=2")
    made = of_hosts(config, world, HOSTS)
    for host in HOSTS:
        made.handle(p.HostReady(host))
    world.ready("rollout-0")
    world.hub.weights.publish(0, "store")
    return made
