"""Show the promise on one machine: as good a policy with a quarter of the dedicated engines.

    python scripts/lending/prove_promise.py --trace AzureLLMInferenceTrace_conv_2023.csv    # all: an hour and more
    python scripts/lending/prove_promise.py --trace FILE --only alone-1 borrowed-1          # a part of it
    python scripts/lending/prove_promise.py --trace FILE --only forecast                    # by the simulator
    python scripts/lending/prove_promise.py --redraw       # table and figure from docs/results/promise alone

docs/benchmarks.md says what the three sides are and what is compared. The computing thread of each
engine, or of both engines of a serving device, has --quota cores. It goes before all other load,
as do the servers in front of engines and the users' clients. Trainer and environment hosts have
what is left. A step has --batch trajectories, and --every seconds something is killed. Users come
as in a public trace, stretched to --rate requests a second and device. Each seed takes one of the
20-minute windows with the largest bursts in their first four minutes. A killed host's sandboxes are
not restored: an agent that is a program of its own has no checkpoints, so it runs again, and gets
the answers that its first run got.

The figures of each run go to --results when it is done, one file per seed. An interrupted proof
goes on from there, on another machine too, but `borrowed` needs an `alone` of the same kind of
machine, which gives it the targets of lending. All that it starts it ends, also after Ctrl-C. It
needs root, Slurm's packages (slurm/dev_cluster.sh install), 4 x quota cores and two more, and a
machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.files import write_whole
from rose.models import resolve
from rose.parts.sandbox import SandboxError
from rose.parts.sandbox.probe import choose
from rose.parts.simulator.traces import TraceError, read
from scripts.csv_tables import put
from scripts.harness import REPOSITORY, configured, flagged
from scripts.lending import promise_page
from scripts.lending.promise_forecast import forecast
from scripts.lending.promise_run import GROUP, MODEL, Plan, machine, profile, run
from scripts.live_runs import Quota, end_in_order, wait_for_calm
from scripts.slurm_jobs import cluster

RESULTS = REPOSITORY / "docs" / "results" / "promise"
SETTINGS = ("steps", "batch", "quota", "rate", "every")  # options that a proof's runs share
# The sides of a seed run in this order, since the targets of `borrowed` come from `alone`.
SIDES = ("alone", "borrowed", "dedicated")
FORECAST = "forecast"  # the word of --only for the simulator's part
FIGURE = REPOSITORY / "docs" / "promise.svg"
PAGE = REPOSITORY / "docs" / "benchmarks.md"


class Results:
    """The files seed-N.json of one folder, all with the same settings, and its forecast.json.

    A seed's file has the settings, and the figures of each side that is done. It is written after
    each side, so that an interrupted proof goes on from it. Times are in seconds since the training
    job was submitted, of online requests since the traffic began. Raises `SystemExit` if the folder
    has runs of other settings, or a file that is damaged.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self._seeds = dict(self._read())
        kept = [seed["settings"] for seed in self._seeds.values()]
        self.settings = dict(settings if settings is not None else kept[0] if kept else {})
        for number, found in zip(self._seeds, kept, strict=True):
            self._check(number, found)

    def _read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for path in sorted(self.folder.glob("seed-*.json")):
            try:
                number = int(path.stem.partition("-")[2])
                found = json.loads(path.read_text(encoding="utf-8"))
                if not found["settings"] or set(found["sides"]) - set(SIDES):
                    raise ValueError(f"its sides must be of {', '.join(SIDES)}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SystemExit(
                    f"prove_promise: {path} is no file of a seed ({error!r}); remove it, and its "
                    "sides run again"
                ) from None
            yield number, found

    def _check(self, seed: int, found: Mapping[str, Any]) -> None:
        keys = sorted({*found, *self.settings})
        both = [(key, found.get(key), self.settings.get(key)) for key in keys]
        if words := "; ".join(
            f"{key} {was!r}, not {now!r}" for key, was, now in both if was != now
        ):
            raise SystemExit(
                f"prove_promise: {self._path(seed)} is of other settings ({words}); give them, or "
                "another --results"
            )

    def _path(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}.json"

    def get(self, side: str, seed: int) -> dict[str, Any] | None:
        """Return the figures of a run, null if it isn't done."""
        return self._seeds[seed]["sides"].get(side) if seed in self._seeds else None

    def put(self, run: dict[str, Any]) -> None:
        """Keep the figures of a run, which has `side` and `seed`."""
        seed = self._seeds.setdefault(run["seed"], {"settings": self.settings, "sides": {}})
        seed["sides"][run["side"]] = run
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(run["seed"]), _written(seed).encode())

    @property
    def forecast(self) -> dict[str, dict[str, float]]:
        """Return the simulator's prediction of each side; empty if none has these settings."""
        path = self.folder / "forecast.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found["sides"] if found.get("settings") == self.settings else {}

    def foresee(self, sides: dict[str, dict[str, float]]) -> None:
        """Keep the simulator's prediction, which must be made before the runs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_rounded({"settings": self.settings, "sides": sides}), indent=1)
        write_whole(self.folder / "forecast.json", f"{text}\n".encode())

    def whole(self) -> list[dict[str, Any]]:
        """Return the runs of all seeds that have every side, in order."""
        done = [seed["sides"] for _, seed in sorted(self._seeds.items())]
        return [sides[side] for sides in done if len(sides) == len(SIDES) for side in SIDES]


def _written(seed: dict[str, Any]) -> str:
    """Return a seed's file, with one line per side, so that a commit shows which side came."""

    def dumped(value: Any) -> str:
        return json.dumps(_rounded(value), separators=(",", ":"))

    sides = ",\n".join(f'"{side}":{dumped(run)}' for side, run in seed["sides"].items())
    return f'{{"settings":{dumped(seed["settings"])},\n"sides":{{\n{sides}\n}}}}\n'


def _rounded(value: Any) -> Any:
    """Return the value with its floats cut to a tenth of a millisecond."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value


def settings(args: Any) -> dict[str, Any]:
    """Return what must be the same in all runs of a proof."""
    found = {key: getattr(args, key) for key in SETTINGS} | {"quota_of": "computing threads"}
    return found | {"trace": args.trace.name, "overrides": args.words}


def checked(args: Any) -> list[tuple[str, int]]:
    """Return the runs that are wanted. Raises `SystemExit` with one line for what would fail."""
    if os.geteuid():
        raise SystemExit("prove_promise: needs root, for virtual nodes and CPU quotas")
    if args.batch % GROUP or args.batch < GROUP or args.steps < 4 or args.seeds < 1:
        raise SystemExit(
            f"prove_promise: --batch {args.batch}: a multiple of {GROUP}; --steps {args.steps}: 4 "
            f"or more; --seeds {args.seeds}: 1 or more"
        )
    if args.trace is None:
        raise SystemExit("prove_promise: --trace FILE is needed, of online requests")
    try:
        read(args.trace)
        choose()
    except (OSError, TraceError, SandboxError) as error:
        raise SystemExit(f"prove_promise: {error}") from None
    Quota("check", args.quota).close()
    everything = [(side, seed) for seed in range(1, args.seeds + 1) for side in SIDES]
    named = {f"{side}-{seed}": (side, seed) for side, seed in everything}
    if unknown := set(args.only) - {*named, FORECAST}:
        raise SystemExit(
            f"prove_promise: --only {' '.join(sorted(unknown))}: no such run; there are "
            f"{', '.join([FORECAST, *named])}"
        )
    return [one for name, one in named.items() if not args.only or name in args.only]


def planned(args: Any) -> Plan:
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model, own = resolve(configured(*MODEL).model), {key: getattr(args, key) for key in SETTINGS}
    return Plan(folder, model, folder / "profile.json", trace=args.trace, words=args.words, **own)


def prove(plan: Plan, args: Any, results: Results, wanted: list) -> None:
    """Do the runs that are not there yet, in order."""
    missing = [one for one in wanted if results.get(*one) is None]
    for side, seed in missing:
        if side == "borrowed" and ("alone", seed) not in missing:
            _check_alone(results.get("alone", seed), seed)
    if any(side == "borrowed" for side, _ in missing) and not plan.profile.exists():
        _say("profile of a serving device")
        wait_for_calm(_say)
        profile(plan, args.profile_s)
    if not results.forecast and (not args.only or FORECAST in args.only):
        _say("forecast of the simulator")
        wait_for_calm(_say)
        results.foresee(forecast(plan))
    if not missing:
        return
    with cluster(plan.folder / "slurm"):
        for side, seed in missing:
            name = f"{side}, seed {seed}"
            wait_for_calm(_say)
            alone = results.get("alone", seed) if side == "borrowed" else None
            log = partial(_say, name=f"{name}: ")
            found = asyncio.run(run(plan, side, seed, alone, log))
            results.put(found)
            _say(f"{name}: done in {found['whole_s']:.0f} s")


def _check_alone(alone: dict[str, Any] | None, seed: int) -> None:
    """Raise `SystemExit` if a `borrowed` run has no `alone` of this machine to be compared with."""
    if alone is None:
        raise SystemExit(
            f"prove_promise: borrowed-{seed} needs alone-{seed}, from which the targets of lending "
            f"come; give --only alone-{seed} borrowed-{seed}"
        )
    if alone["machine"] != machine():
        raise SystemExit(
            f"prove_promise: alone-{seed} ran on {alone['machine']}, and this is {machine()}: "
            f"latencies can't be compared; remove seed-{seed}.json, and its sides run again here"
        )


def draw(results: Results, figure: Path) -> None:
    """Print the table and write the figure, of the seeds that have all sides. The table goes into
    docs/benchmarks.md, too, where the figure is the docs' own."""
    runs = results.whole()
    if not runs:
        print(f"no seed has all of {', '.join(SIDES)} yet: nothing to draw")
        return
    found = results.settings
    seeds = len(runs) // len(SIDES)
    words = f"{seeds} seed{'s' * (seeds > 1)}, {found['steps']} steps of {found['batch']}"
    svg = promise_page.figure(runs, f"{words} trajectories")
    write_whole(figure, svg.encode())
    text = promise_page.table(promise_page.lines(runs, results.forecast))
    if figure == FIGURE:
        put(PAGE, "promise", text)
    print(f"\n{text}\n\n{figure}")


def _say(words: str, name: str = "") -> None:
    print(f"{time.strftime('%H:%M:%S')} {name}{words}", flush=True)


def main() -> None:
    numbers = {"seeds": 3, "steps": 40, "batch": 64, "quota": 0.1, "rate": 0.2, "every": 60.0}
    paths = {"out": REPOSITORY / "outputs" / "promise", "results": RESULTS, "figure": FIGURE}
    more = {"trace": Path, "profile_s": 40.0, "only": list[str](), "redraw": False}
    args = flagged(__doc__, None, "OVERRIDE", **numbers, **paths, **more)
    if args.redraw:
        draw(Results(args.results), args.figure)
        return
    end_in_order()
    wanted = checked(args)
    results = Results(args.results, settings(args))
    prove(planned(args), args, results, wanted)
    draw(results, args.figure)


if __name__ == "__main__":
    main()
