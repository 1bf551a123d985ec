"""Doubts about what a run would learn, before it starts: its data, learning rate and evaluation.

A doubt is the text of a warning: the run may start nevertheless. Left out: doubts about ranks,
memory and machines (rose/launch/plan.py).
"""

from __future__ import annotations

from rose.config import Config, ConfigError
from rose.launch import local
from rose.policies import registry


def of(c: Config, staleness: int, corrects: bool) -> tuple[str, ...]:
    """Return all doubts. `staleness` and `corrects` are as for `stale`. Raises `ConfigError` as
    `stale` and `check_importance` do."""
    check_importance(c)
    return (
        stale(c, staleness, corrects)
        + narrowed(c, corrects)
        + warming_up(c)
        + unevaluated(c)
        + unpunished(c)
        + unshared(c)
        + unset(c)
    )


def simulated(c: Config) -> tuple[str, ...]:
    """Return a doubt about a provisioning policy that has its effect in simulations only."""
    name = c.scheduler.provisioning.name
    policy = registry.policy("provisioning", c.scheduler.provisioning)
    if c.mode != "train" or not getattr(policy, "simulated_only", False):
        return ()
    return (
        f"scheduler.provisioning.name={name!r} works in simulations only (docs/policies.md): "
        "this run is as with scheduler/provisioning=all_idle or fixed",
    )


def stale(c: Config, staleness: int, corrects: bool) -> tuple[str, ...]:
    """Return a doubt if nothing corrects for data that is up to `staleness` versions old.
    `corrects`: the algorithm corrects for it. Only one_step_off gets a doubt, since its paper
    (arXiv 2410.18252) trains without importance weights. Others raise `ConfigError`."""
    if not staleness or corrects or c.algorithm.importance_cap is not None:
        return ()
    name = c.scheduler.batching.name
    text = (
        f"scheduler.batching.name={name!r} trains on data up to {staleness} versions old, and "
        f"nothing corrects for their age: algorithm.name={c.algorithm.name!r} does not, and "
        "algorithm.importance_cap=null; take algorithm=decoupled_ppo, or "
        "algorithm.importance_cap=2.0"
    )
    if name == "one_step_off":
        return (text,)
    raise ConfigError(text)


def check_importance(c: Config) -> None:
    """Raise `ConfigError` for limits of importance weights that have no effect."""
    cap, floor = c.algorithm.importance_cap, c.algorithm.importance_floor
    if floor is not None and (cap is None or floor >= cap):
        raise ConfigError(
            f"algorithm.importance_floor={floor:g}: needs an algorithm.importance_cap above it, "
            f"which is {'null' if cap is None else format(cap, 'g')}; 0.5 with "
            "algorithm.importance_cap=5.0 are IcePop's"
        )
    if cap is None and c.algorithm.importance_level != "token":
        raise ConfigError(
            f"algorithm.importance_level={c.algorithm.importance_level}: has no effect with "
            "algorithm.importance_cap=null; give a cap, or token"
        )


def narrowed(c: Config, corrects: bool) -> tuple[str, ...]:
    """Return a doubt about rollout.top_p and top_k. The trained policy is the distribution over all
    tokens at rollout.temperature, and these two leave tokens out. The engine's log-probabilities
    are taken after them, so importance weights correct for drawing the other tokens too often."""
    r = c.rollout
    found = {"top_p": (r.top_p, 1.0), "top_k": (r.top_k, 0)}
    other = {
        f"rollout.{name}={v:g}": f"{usual:g}" for name, (v, usual) in found.items() if v != usual
    }
    if not other or r.replay is not None:
        return ()
    weighed = corrects or c.algorithm.importance_cap is not None
    by = "importance weights correct"
    if not weighed:
        by = "no weight corrects (algorithm.importance_cap=null)"
    return (
        f"{', '.join(other)}: tokens that are left out are never tried, though the policy that is "
        "trained has them, and the others are drawn more often than it draws them, for which "
        f"{by}; {', '.join(other.values())} is exact",
    )


def unpunished(c: Config) -> tuple[str, ...]:
    """Return doubts about DAPO's overlong punishment, if it begins at the first token or above the
    length that a trajectory can reach. With algorithm.args.max_response_tokens=null it begins below
    each turn's own limit, which can be reached."""
    args = c.algorithm.args
    most, buffer = args.get("max_response_tokens"), args.get("overlong_buffer")
    if buffer == 0:
        return ()
    if most is None:
        return tuple(
            f"algorithm.args.overlong_buffer={buffer}: with max_response_tokens=null a turn's "
            f"limit is {c.env.key_of(name)}.max_new_tokens={member.max_new_tokens}, so that its "
            "first token is punished already; null takes a fifth of each limit, as the paper does"
            for name, member in c.env.members.items()
            if buffer is not None and buffer >= member.max_new_tokens
        )
    begin = most - (most / 5 if buffer is None else buffer)
    found = []
    for name, member in c.env.members.items():
        turns, key = member.max_turns * member.max_new_tokens, c.env.key_of(name)
        # An agent's own program may start again with a shorter history. Its trajectory may then
        # have more tokens than a context.
        branches = member.name in ("agent", "verifiers")
        if (turns if branches else min(turns, c.model.max_context)) <= begin:
            found.append(
                f"algorithm.args.max_response_tokens={most}: the overlong punishment begins above "
                f"{begin:g} tokens, which no trajectory of {key} reaches: {key}.max_turns="
                f"{member.max_turns} of {key}.max_new_tokens={member.max_new_tokens} in a context "
                f"of model.max_context={c.model.max_context}; null goes by these limits"
            )
    return tuple(found)


def unshared(c: Config) -> tuple[str, ...]:
    """Return a doubt about ZeRO stage 3 with one rank, which gathers parameters that it already
    has."""
    if c.trainer.ranks > 1 or c.trainer.zero_stage < 3:
        return ()
    return (
        "trainer.zero_stage=3: with trainer.ranks=1 nothing is shared out, and its gathering costs "
        "time; trainer.zero_stage=2 has the same results",
    )


def unset(c: Config) -> tuple[str, ...]:
    """Return doubts about environment variables that an agent's program shall get and that are not
    set here. This is no error, since a Slurm job's environment may differ."""
    found, ours = [], local.environment(c)
    for key, member in c.environments.values():
        names = member.args.get("environment") or () if member.name == "agent" else ()
        if lacks := [name for name in names if name not in ours]:
            found.append(
                f"{key}.args.environment={list(names)}: {', '.join(lacks)} is not set here, so the "
                f"program will run without it; export it, or give +cluster.env.{lacks[0]}=VALUE"
            )
    return tuple(found)


def unclipped(c: Config, recomputes: bool) -> tuple[str, ...]:
    """Return a doubt about bounds of ratios, other than grpo's defaults, that have no effect.
    `recomputes`: ratios are relative to the policy at the step's start. With one update a step,
    that is the trained policy itself, however old the data is."""
    args = c.algorithm.args
    usual = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "loss": "clip"}
    chosen = [
        f"algorithm.args.{key}={args[key]}"
        for key, value in usual.items()
        if args.get(key) not in (None, value)
    ]
    if not chosen or not recomputes or c.trainer.updates_per_step > 1:
        return ()
    return (
        f"{', '.join(chosen)}: without effect at trainer.updates_per_step=1, where every ratio to "
        "the policy at the step's start is 1 and nothing is clipped (clip_fraction stays 0); 2 or "
        "more updates a step are clipped",
    )


def warming_up(c: Config) -> tuple[str, ...]:
    """Return a doubt about a learning-rate warm-up that is longer than the run. This is no error,
    since the user may continue the run with more steps."""
    o, updates = c.trainer.optimizer, c.trainer.steps * c.trainer.updates_per_step
    if o.warmup_steps <= updates:
        return ()
    last = o.lr * updates / o.warmup_steps
    return (
        f"trainer.optimizer.warmup_steps={o.warmup_steps}: trainer.steps={c.trainer.steps} gives "
        f"{updates} updates, the last of them at a learning rate of {last:g}, not "
        f"trainer.optimizer.lr={o.lr:g}",
    )


def unevaluated(c: Config) -> tuple[str, ...]:
    """Return a doubt about held-out tasks, which conf/ has by default, in a run without engines."""
    tasks = c.eval.episodes + sum(one.episodes for one in c.eval.sets.values())
    if c.rollout.replay is None or not tasks:
        return ()
    return (
        f"rollout.replay={c.rollout.replay} starts no engines: none of the {tasks} held-out tasks "
        "is evaluated; eval.episodes=0, without eval.sets, says that this is meant",
    )
