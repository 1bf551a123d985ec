"""mode=plan: finds the cheapest numbers of dedicated and borrowed GPUs with which a step takes at
most a target time, and gives the reasons.

Every pair of sim.plan.dedicated x sim.plan.borrowed is simulated with the configured system. The
price of a borrowed GPU is sim.plan.borrowed_price times that of a dedicated one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from rose.config import ConfigError
from rose.observe.terminal import echo, show
from rose.parts.simulator.config import Config
from rose.parts.simulator.study import build, page, runs, table
from rose.parts.simulator.study.gains import Interval, interval
from rose.parts.simulator.study.outcome import Outcome, mean, values
from rose.parts.simulator.study.pools import gpus

CAPS = ("n_serving", "max")  # arguments of provisioning policies that limit the borrowed workers
# The fastest pair is mentioned if it saves more than this share of the advised pair's step time.
WORTH = 0.02  # ours: less than seeds differ


@dataclass(frozen=True)
class Pair:
    """A pair that was simulated, in numbers of GPUs (not workers), without the trainer's."""

    dedicated: int
    borrowed: int
    price: float  # unit: the price of a dedicated GPU
    step_s: Interval
    outcomes: tuple[Outcome, ...]

    @property
    def words(self) -> str:
        return f"{self.dedicated} dedicated + {self.borrowed} borrowed"

    def share(self, part: str) -> float:
        """Return the share of a step's time that a part, such as "rollout_s", takes."""
        return mean(self.outcomes, part) / self.step_s.mean


@dataclass(frozen=True)
class Answer:
    """The result of the search, with the reasons as sentences."""

    target_s: float
    pairs: tuple[Pair, ...]  # all simulated pairs
    advised: Pair | None  # None: no pair reaches the target
    reasons: tuple[str, ...]


def target(c: Config) -> float:
    """Return the seconds that a step may take. Raises `ConfigError` unless exactly
    one target is given."""
    p = c.sim.plan
    if (p.steps_per_hour is None) == (p.hours is None):
        raise ConfigError(
            f"sim.plan.steps_per_hour={p.steps_per_hour}, sim.plan.hours={p.hours}: mode=plan "
            "needs one of them: sim.plan.steps_per_hour=20, or sim.plan.hours=48 for "
            "trainer.steps steps"
        )
    return (
        3600 / p.steps_per_hour
        if p.steps_per_hour is not None
        else p.hours * 3600 / c.trainer.steps
    )


def borrowed_pool(c: Config) -> str:
    """Return the pool that is sized beside the dedicated one, or "". Raises `ConfigError`."""
    found = [
        name
        for name in c.sim.pools
        if c.sim.pool[name].kind in ("cooperative", "spot", "serverless")
    ]
    if "dedicated" not in c.sim.pools or len(found) > 1:
        raise ConfigError(
            f"sim.pools={c.sim.pools}: mode=plan sizes `dedicated` and at most one of cooperative, "
            "spot and serverless"
        )
    return found[0] if found else ""


def pair_config(c: Config, dedicated: int, borrowed: int) -> Config | None:
    """Return the configuration with these numbers of workers; None if it has no worker at all."""
    pool, name = dict(c.sim.pool), borrowed_pool(c)
    sizes = {"dedicated": dedicated} | ({name: borrowed} if name else {})
    pool |= {key: msgspec.structs.replace(pool[key], workers=size) for key, size in sizes.items()}
    pools = [key for key in c.sim.pools if sizes.get(key, 1)]
    if not pools:
        return None
    provisioning = c.scheduler.provisioning
    if "max" in provisioning.args and not borrowed:  # It has no pool to request workers from.
        provisioning = msgspec.structs.replace(provisioning, name="fixed", args={})
    capped = {key: borrowed for key in CAPS if key in provisioning.args}
    if "min" in provisioning.args:
        capped["min"] = min(provisioning.args["min"], borrowed)
    provisioning = msgspec.structs.replace(provisioning, args=provisioning.args | capped)
    return msgspec.structs.replace(
        c,
        name=f"{dedicated}+{borrowed}",
        sim=msgspec.structs.replace(c.sim, pool=pool, pools=pools, systems={}),
        scheduler=msgspec.structs.replace(c.scheduler, provisioning=provisioning),
    )


def pair_configs(c: Config) -> dict[tuple[int, int], Config]:
    """Return the configuration of each pair with a worker. Raises `ConfigError` if all pairs are
    without workers, or a pair can't be simulated."""
    name = borrowed_pool(c)
    asked = [
        (d, b)
        for d in sorted(set(c.sim.plan.dedicated))
        for b in (sorted(set(c.sim.plan.borrowed)) if name else [0])
    ]
    made = {pair: found for pair in asked if (found := pair_config(c, *pair)) is not None}
    if not made:
        raise ConfigError(
            f"sim.plan.dedicated={c.sim.plan.dedicated}, sim.plan.borrowed={c.sim.plan.borrowed}: "
            "give pairs with at least one worker"
        )
    for (dedicated, borrowed), each in made.items():
        system = build.ours(each)
        try:
            build.make_scheduler(each, system)
            build.make_spec(each, each.sim.label, system, each.sim.seeds[0])
        except ConfigError as error:
            raise ConfigError(
                f"{error} (with {dedicated} of sim.plan.dedicated and {borrowed} of "
                "sim.plan.borrowed)"
            ) from None
    return made


def search(c: Config, carry_out: Callable[[Sequence[runs.Job]], list[Outcome]]) -> Answer:
    """Simulate all pairs and choose one. Raises `ConfigError`, and the errors of `carry_out`."""
    made = pair_configs(c)
    outcomes = carry_out([job for each in made.values() for job in runs.jobs_of(each)])
    pairs = tuple(
        _pair(c, *pair, [o for o in outcomes if o.point == each.name])
        for pair, each in made.items()
    )
    return _answer(target(c), pairs)


def _pair(c: Config, dedicated: int, borrowed: int, outcomes: list[Outcome]) -> Pair:
    """Sum up the outcomes with these numbers of workers."""
    name = borrowed_pool(c)
    own = dedicated * gpus(c.sim.pool["dedicated"])
    lent = borrowed * gpus(c.sim.pool[name]) if name else 0
    return Pair(
        own,
        lent,
        own + c.sim.plan.borrowed_price * lent,
        interval(values(outcomes, "step_s")),
        tuple(outcomes),
    )


def _answer(target_s: float, pairs: tuple[Pair, ...]) -> Answer:
    """Advise the cheapest pair that reaches the target, and give the reasons."""
    reach = [pair for pair in pairs if pair.step_s.mean <= target_s]
    fastest = min(pairs, key=lambda pair: (pair.step_s.mean, pair.price))
    if not reach:
        return Answer(
            target_s,
            pairs,
            None,
            (
                f"no pair reaches {target_s:.1f} s a step; the fastest, {fastest.words}, takes "
                f"{fastest.step_s.mean:.1f} s",
                _limit(fastest),
            ),
        )
    advised = min(reach, key=lambda pair: (pair.price, pair.step_s.mean))
    reasons = [
        f"{advised.words}: {advised.step_s.mean:.1f} s a step, "
        f"{_less(advised.step_s.mean, target_s)} than the "
        f"target of {target_s:.1f} s, at the price of {advised.price:.1f} dedicated GPUs",
        _limit(advised),
    ]
    cheaper = [pair for pair in pairs if pair.price < advised.price]
    if cheaper:
        next_ = min(cheaper, key=lambda pair: pair.step_s.mean)
        reasons.append(
            f"the fastest of the {len(cheaper)} cheaper pairs, {next_.words}, takes "
            f"{next_.step_s.mean:.1f} s"
        )
    alone = [pair for pair in reach if not pair.borrowed]
    if alone and advised.borrowed:
        least = min(alone, key=lambda pair: pair.price)
        reasons.append(
            f"without borrowing it takes {least.dedicated} dedicated GPUs ({least.step_s.mean:.1f} "
            "s)"
        )
    elif advised.borrowed:
        reasons.append("without borrowing no number that was tried reaches it")
    if fastest.step_s.mean < (1 - WORTH) * advised.step_s.mean:
        reasons.append(
            f"the fastest pair, {fastest.words}, takes {fastest.step_s.mean:.1f} s for "
            f"{fastest.price / advised.price:.1f} times the price"
        )
    return Answer(target_s, pairs, advised, tuple(reasons))


def _less(value: float, than: float) -> str:
    return f"{1 - value / than:.0%} less"


def _limit(pair: Pair) -> str:
    """Return a sentence on what limits the step: training or rollout."""
    train, roll = pair.share("train_s"), pair.share("rollout_s")
    if train > roll:
        return (
            f"training takes {train:.0%} of the step: more rollout GPUs gain little, trainer.ranks "
            "would"
        )
    return f"rollout takes {roll:.0%} of the step, training {train:.0%}"


def shown(answer: Answer, title: str) -> Table:
    """Return the trade-off as a table with a row per pair, by price."""
    made = Table(title=title, title_justify="left", header_style="bold")
    columns = "Dedicated", "Borrowed", "Price", "Step, s [95%]", "Rollout", "Train", "SLO kept", ""
    for column in columns:
        made.add_column(column, justify="right")
    for pair in sorted(answer.pairs, key=lambda pair: (pair.price, pair.step_s.mean)):
        chosen = pair is answer.advised
        mark = "advised" if chosen else "reaches it" if pair.step_s.mean <= answer.target_s else ""
        attained = mean(pair.outcomes, "attainment")
        made.add_row(
            str(pair.dedicated),
            str(pair.borrowed),
            f"{pair.price:.1f}",
            table.words(pair.step_s),
            f"{pair.share('rollout_s'):.0%}",
            f"{pair.share('train_s'):.0%}",
            "–" if attained != attained else f"{attained:.2%}",
            mark,
            style="bold" if chosen else None,
        )
    return made


def summary(answer: Answer) -> dict[str, Any]:
    """Return the answer for result.json."""
    rows = [
        {
            "dedicated_gpus": pair.dedicated,
            "borrowed_gpus": pair.borrowed,
            "price": pair.price,
            "step_s": pair.step_s.mean,
            "reaches": pair.step_s.mean <= answer.target_s,
        }
        for pair in answer.pairs
    ]
    advised = answer.advised and {
        "dedicated_gpus": answer.advised.dedicated,
        "borrowed_gpus": answer.advised.borrowed,
        "step_s": answer.advised.step_s.mean,
    }
    return {
        "target_s": answer.target_s,
        "advised": advised,
        "reasons": list(answer.reasons),
        "pairs": rows,
    }


def answer(c: Config, console: Console, command: str) -> None:
    """Search, print trade-off and reasons, and write report.html, result.csv and result.json."""
    found = search(c, lambda jobs: runs.carry_out(jobs, runs.cores(c.sim.processes), console))
    show(console, shown(found, f"{c.name}: a step within {found.target_s:.1f} s"))
    for reason in found.reasons:
        echo(console, f"- {reason}")
    outcomes = [outcome for pair in found.pairs for outcome in pair.outcomes]
    table.write_files(c.run_dir, outcomes, {"command": command} | summary(found))
    page.plan(c.run_dir / "report.html", c, found, command)
    echo(console, f"{c.run_dir / 'report.html'}")
