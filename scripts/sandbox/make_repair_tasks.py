"""Make repair tasks for env=terminal: small Python modules with one bug each, and their tests.

    python scripts/sandbox/make_repair_tasks.py --out tasks --count 200 --held-out 40 --seed 1
    python launch.py env=terminal env.args.tasks=tasks model=...

A module is one of `MODULES` with constants drawn from the seed. Its bug is one changed operator,
comparison or constant that makes tests fail which the module passes. So each task is solved by the
original module (solution/solve.sh). No two tasks have the same text, and no module is in both
splits. The agent sees half of the tests, of which at least one fails. All tests judge, in another
process than the module's. Left out: bugs in two places.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

RUN_S = 5.0  # seconds of all tests of a module, because a bug may make a loop endless
DRAWS = 200  # attempts to find one new task
CASES = 12
CHECK_S = 10  # seconds of the agent's module, below verifier.timeout_sec

# (name, source, inputs): A and B are constants of 2 to 60, A < B; inputs draw the arguments.
MODULES = {
    "clamp": "def clamp(x):\n    if x < A:\n        return A\n    if x > B:\n        return B\n    return x\n",
    "digits": "def digits(x):\n    total = A\n    x = abs(x)\n    while x > 0:\n        total += x % 10\n        x //= 10\n    return total * B\n",
    "count": "def count(xs):\n    found = 0\n    for x in xs:\n        if x >= A and x <= B:\n            found += 1\n    return found\n",
    "fares": "def fares(x):\n    base = A\n    if x <= 0:\n        return base\n    if x > B:\n        return base + B + 2 * (x - B)\n    return base + x\n",
    "runs": "def runs(xs):\n    best = now = 0\n    for x in xs:\n        if x > A:\n            now += 1\n            best = max(best, now)\n        else:\n            now = 0\n    return best * B\n",
    "wrap": "def wrap(x):\n    size = B - A\n    while x >= B:\n        x -= size\n    while x < A:\n        x += size\n    return x\n",
    "total": "def total(xs):\n    made = 0\n    for i, x in enumerate(xs):\n        if i % 2 == 0:\n            made += A * x\n        else:\n            made -= x + B\n    return made\n",
    "places": "def places(xs):\n    found = []\n    for i in range(len(xs)):\n        if xs[i] * A > B and i > 0:\n            found.append(i - 1)\n    return found\n",
    "pairs": "def pairs(xs):\n    count = 0\n    for i in range(len(xs)):\n        for j in range(i + 1, len(xs)):\n            if xs[i] + xs[j] == A + B or xs[i] - xs[j] == A:\n                count += 1\n    return count\n",
    "steps": "def steps(x):\n    made = 0\n    x = abs(x) + 1\n    while x != 1 and made < A + B:\n        x = x // 2 if x % 2 == 0 else 3 * x + 1\n        made += 1\n    return made\n",
}
# These modules take a number, the others a list.
OF_ONE = ("clamp", "digits", "fares", "wrap", "steps")

SWAPS = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.FloorDiv: (ast.Mod,),
    ast.Mod: (ast.FloorDiv,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}

RUN = """\
import json, sys
order = json.load(sys.stdin)
space = {}
exec(order["source"], space)
made = []
for case in order["cases"]:
    try:
        made.append(space[order["name"]](case))
    except Exception as error:
        made.append(repr(error))
print(json.dumps(made))
"""
CHECK = '''\
"""Exit code 0 if {name} gives what is expected. {name} runs in a process of its own."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

RUN = """
import json, os, sys
answer, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
cases = json.load(sys.stdin)
sys.path.insert(0, "/app")
from {name} import {name}
made = []
for case in cases:
    try:
        made.append({name}(case))
    except Exception as error:
        made.append(repr(error))
print(json.dumps(made), file=answer)
"""
hidden = {hidden}
source = Path(__file__).parent / "{cases}"
verdict = Path("/logs/verifier/reward.txt")
cases = json.loads(source.read_text())
if hidden:  # the module can neither look up what is expected nor read it in this process
    source.unlink()
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
# an edit within a second of the last run, and of the same length, would leave its bytecode in use
argv = [sys.executable, "-I", "-B", "-X", "pycache_prefix=/nowhere", "-c", RUN]
given = json.dumps([case for case, _ in cases])
try:
    done = subprocess.run(argv, input=given, stdout=subprocess.PIPE, text=True, timeout={run_s})
    answers = json.loads(done.stdout)
except (subprocess.TimeoutExpired, OSError, ValueError):
    answers = None
if not isinstance(answers, list) or len(answers) != len(cases):
    print("{name}.py does not answer every case within {run_s} s")
    answers = [None] * len(cases)
failed = 0
for (case, expected), found in zip(cases, answers):
    if type(found) is not type(expected) or found != expected:
        failed += 1
        print(f"{name}({{case}}) is {{found}}, not {{expected}}")
if hidden:  # nothing that the module started writes after this process
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    verdict.unlink(missing_ok=True)
    verdict.write_text(str(int(failed == 0)))
sys.exit(failed > 0)
'''


def module(rng: random.Random) -> tuple[str, str]:
    """Return a module's name and source."""
    name = rng.choice(sorted(MODULES))
    a, b = sorted(rng.sample(range(2, 61), 2))
    tree = ast.parse(MODULES[name])
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in "AB":
            node.id = str(a if node.id == "A" else b)
    return name, ast.unparse(tree) + "\n"


def inputs(name: str, source: str, rng: random.Random) -> list:
    """Return arguments on both sides of the source's constants, and equal to them."""
    known = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
    near = [value + d for value in known for d in (-1, 0, 1)]
    drawn = [rng.randint(-20, 90) for _ in range(CASES)]
    if name in OF_ONE:
        return sorted({*near, *drawn})
    pool = near + drawn
    return [[rng.choice(pool) for _ in range(rng.randint(1, 7))] for _ in range(2 * CASES)]


def mutants(source: str) -> Iterator[str]:
    """Yield every source with one place changed."""
    tree = ast.parse(source)
    for i, node in enumerate(ast.walk(tree)):
        for change in _changes(node):
            made = copy.deepcopy(tree)
            change(list(ast.walk(made))[i])
            yield ast.unparse(made) + "\n"


def _changes(node: ast.AST) -> Iterator:
    if isinstance(node, ast.Compare):
        for other in SWAPS.get(type(node.ops[0]), ()):
            yield lambda at, other=other: at.ops.__setitem__(0, other())
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp):
        for other in SWAPS.get(type(node.op), ()):
            yield lambda at, other=other: setattr(at, "op", other())
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        for step in (-1, 1):
            yield lambda at, step=step: setattr(at, "value", at.value + step)


def answers(name: str, source: str, cases: list) -> list | None:
    """Return the module's result for each case; None if it doesn't end."""
    order = json.dumps({"source": source, "name": name, "cases": cases})
    try:
        argv = [sys.executable, "-I", "-S", "-c", RUN]
        done = subprocess.run(argv, input=order, capture_output=True, text=True, timeout=RUN_S)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout) if done.returncode == 0 else None


def write(folder: Path, name: str, whole: str, broken: str, cases: list, shown: list) -> None:
    def check(cases: str, hidden: bool) -> str:
        return CHECK.format(name=name, cases=cases, hidden=hidden, run_s=CHECK_S)

    for path, text in {
        f"environment/{name}.py": broken,
        "environment/examples.json": json.dumps(shown),
        f"environment/test_{name}.py": check("examples.json", hidden=False),
        "tests/cases.json": json.dumps(cases),
        "tests/check.py": check("cases.json", hidden=True),
        "tests/test.sh": "exec python3 -I /tests/check.py\n",
        "solution/solve.sh": f"cat > {name}.py <<'END'\n{whole}END\n",
        "instruction.md": f"{name}.py has one bug: python3 test_{name}.py shows it. Mend {name}.py.\n",
        "task.toml": "[agent]\ntimeout_sec = 300\n[verifier]\ntimeout_sec = 20\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def make(out: Path, count: int, held_out: int, seed: int) -> None:
    """Write the tasks of both splits. Raises `SystemExit` if there are too few of them."""
    rng, seen = random.Random(seed), set()
    split_of: dict[str, str] = {}  # split of each module's source
    for split, wanted in (("train", count - held_out), ("held_out", held_out)):
        for number in range(wanted):
            for _ in range(DRAWS):
                name, whole = module(rng)
                broken = rng.choice(sorted(set(mutants(whole))))
                if split_of.setdefault(whole, split) != split or broken in seen or broken == whole:
                    continue
                given = inputs(name, whole, rng)
                right, wrong = answers(name, whole, given), answers(name, broken, given)
                if right is None or wrong is None or right == wrong:
                    continue
                break
            else:
                raise SystemExit(f"--count {count}: no further task in {DRAWS} draws")
            seen.add(broken)
            cases = [[case, result] for case, result in zip(given, right, strict=True)]
            failing = next(i for i, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b)
            shown = [c for i, c in enumerate(cases) if i % 2 == failing % 2]
            write(out / split / f"{name}-{number:05d}", name, whole, broken, cases, shown)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to make; must not exist")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=40, help="of them")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if args.out.exists():
        raise SystemExit(f"--out {args.out}: exists already; remove it or give another folder")
    if not 0 < args.held_out < args.count:
        raise SystemExit(f"--held-out {args.held_out}: above 0 and below --count {args.count}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=args.out.name, dir=args.out.parent) as folder:
        made = Path(folder) / "tasks"
        make(made, args.count, args.held_out, args.seed)
        made.rename(args.out)  # a rename, so that the folder is there whole or not at all
    print(f"{args.count} tasks in {args.out}, {args.held_out} of them held out")


if __name__ == "__main__":
    main()
