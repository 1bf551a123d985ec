"""Events that tests feed to a scheduler, in few words."""

from rose.config import Policy
from rose.config import Scheduler as SchedulerConfig
from rose.policies import build
from rose.scheduler import events as ev

ONE_BATCH = {"max_admitted": 4.0}


def built(timeout_s=60.0, queue_depth=0.0, batching_args=ONE_BATCH, **policies):
    """A scheduler of policies as NAME or (NAME, args), the others the plainest that there are."""
    plain = {"provisioning": "fixed", "routing": "least_loaded", "order": "fifo"}
    plain |= {"batching": ("synchronous", batching_args)} | policies
    named = {kind: (each, {}) if isinstance(each, str) else each for kind, each in plain.items()}
    chosen = {kind: Policy(name=name, args=args) for kind, (name, args) in named.items()}
    return build(SchedulerConfig(**chosen, queue_depth=queue_depth), timeout_s)


def joined(worker, sequences=8, kv=1000, kind="dedicated", at=0.0, version=0, **more):
    sizes = {"max_sequences": sequences, "kv_tokens": kv}
    return ev.WorkerJoined(at=at, worker=worker, kind=kind, version=version, **sizes, **more)


def lends(worker, kv, sequences=8, at=0.0, expected=0.0, revoked=False):
    room = {"kv_tokens": kv, "max_sequences": sequences, "expected_s": expected}
    return ev.WorkerCapacity(at=at, worker=worker, revoked=revoked, **room)


def asked(turn, at=0.0, context=10, new=10, **more):
    """A turn GROUP.MEMBER.tN is wanted."""
    whose = {"trajectory": turn.rpartition(".")[0], "group": turn.partition(".")[0]}
    sizes = {"context_tokens": context, "max_new_tokens": new}
    return ev.TurnRequested(at=at, turn=turn, **whose, **sizes, **more)


def placed(actions):
    """turn -> worker of the turns that these actions assign."""
    return {a.turn: a.worker for a in actions if isinstance(a, ev.AssignTurn)}
