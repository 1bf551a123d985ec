"""Messages and episodes that tests make, in few words."""

from rose import protocol as p
from rose.reward.episode import Episode


def result(turn, tokens, logprob=-1.0, version=0, finish=p.FinishReason.STOP, **more):
    """A turn whose tokens are alike in log-probability and version."""
    n = len(tokens)
    packed = (p.pack_tokens(tokens), p.pack_floats([logprob] * n), p.pack_tokens([version] * n))
    return p.TurnResult(turn, *packed, finish, **more)


def trajectory(name, tokens=(), mask=(), logprobs=(), versions=(), reward=0.0, **more):
    packed = {"tokens": p.pack_tokens(tokens), "mask": bytes(mask)}
    packed |= {"logprobs": p.pack_floats(logprobs), "versions": p.pack_tokens(versions)}
    plain = {"phase": p.Phase.TRAIN, "success": False, "turns": 1, "response_tokens": sum(mask)}
    group = name.partition(".")[0]
    return p.Trajectory(id=name, group=group, reward=reward, **packed, **plain | more)


def episode(**more):
    plain = {"trajectory": "g0.0", "domain": "d", "seed": 1, "task": {}, "transcript": []}
    plain |= {"reward": 0.0, "success": False, "truncated": False, "turns": 1}
    return Episode(**plain | more)
