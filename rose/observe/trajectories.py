"""The trajectories of a step as they were trained on, read from rollouts/step-N.msgpack for people
to look at.

Tokens become text by the model's tokenizer alone, so nothing of transformers is loaded; where the
tokenizer can't be found, the tokens' numbers stand for them. A trajectory whose history
branches has a sample for each leaf.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

STEP_FILES = "rollouts/step-*.msgpack"
LEFT_OUT = ("branches", "turn_tokens")  # samples tell of these


class Part(NamedTuple):
    """A run of tokens, all made by the policy in one turn or all given to it."""

    made: bool
    start: int  # position of the first token
    tokens: np.ndarray  # (n,) int32
    logprobs: np.ndarray  # (n,) float32, nats; 0 where given
    versions: np.ndarray  # (n,) int32; -1 where given
    turn: int = -1  # that made it; -1 where given, or not known

    @property
    def of_versions(self) -> str:
        """The policy versions that made it, in words; "" if none did."""
        if not self.made:
            return ""
        low, high = int(self.versions.min()), int(self.versions.max())
        return f"version {low}" if low == high else f"versions {low} to {high}"


class Sample(NamedTuple):
    """One sequence that the trainer saw. All fields are (T,)."""

    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    turns: np.ndarray  # turn that made the token; -1 where given, or not known

    def parts(self) -> Iterator[Part]:
        changes = (np.diff(self.mask) != 0) | (np.diff(self.turns) != 0)
        ends = [*(np.flatnonzero(changes) + 1), len(self.mask)]
        start = 0
        for end in ends if len(self.mask) else ():
            at = slice(start, end)
            made = bool(self.mask[start])
            turn = int(self.turns[start])
            yield Part(made, start, self.tokens[at], self.logprobs[at], self.versions[at], turn)
            start = int(end)


@dataclass
class Shown:
    """A trajectory with its samples. `record`: what its file holds, without tokens and branches."""

    record: dict[str, Any]
    samples: list[Sample]

    @property
    def id(self) -> str:
        return str(self.record["id"])

    @property
    def reward(self) -> float:
        return float(self.record.get("reward") or 0.0)

    def about(self, part: Part) -> str:
        """Which turn made it, and what that one's reward was, in words; "" where not known."""
        rewards = self.record.get("turn_rewards") or []
        if part.turn < 0:
            return ""
        paid = f", reward {rewards[part.turn]:g}" if part.turn < len(rewards) else ""
        return f"turn {part.turn}{paid}"

    @property
    def made(self) -> int:
        """Tokens that the policy made."""
        return sum(int(sample.mask.sum()) for sample in self.samples)

    @property
    def length(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def failed(self) -> bool:
        """A limit ended it, or a tool call of it could not be read."""
        return bool(self.record.get("truncated") or self.record.get("invalid_calls"))

    @property
    def outcome(self) -> str:
        """In words."""
        if "cause" in self.record:
            return "failed and was replaced"
        words = ["solved" if self.record.get("success") else "not solved"]
        if self.record.get("truncated"):
            words.append("cut by a limit")
        if calls := self.record.get("invalid_calls"):
            words.append(f"{calls} unreadable call{'s' * (calls > 1)}")
        return ", ".join(words)


def saved_steps(run_dir: Path) -> list[int]:
    """The steps whose trajectories are there, in order."""
    return sorted(int(path.stem.removeprefix("step-")) for path in Path(run_dir).glob(STEP_FILES))


def read(run_dir: Path, step: int) -> list[Shown]:
    """In the order of the groups. Raises `ValueError` naming the file when it is damaged."""
    path = Path(run_dir) / "rollouts" / f"step-{step:06d}.msgpack"
    found: list[Shown] = []
    try:
        for group in msgspec.msgpack.decode(path.read_bytes()):
            for record in group:
                found.append(of_record(record))
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: holds no trajectories: {type(error).__name__}: {error}"
        ) from None
    return found


def of_record(record: dict[str, Any]) -> Shown:
    """Return what a file holds of a trajectory. Fields are taken by name and not by type, since a
    later release may have stored more of them. Raises `ValueError`, KeyError, TypeError or
    AttributeError of what is none."""
    leaves = [record, *record.get("branches", ())] if "mask" in record else []
    samples = [_sample(leaf) for leaf in leaves]
    kept = {k: v for k, v in record.items() if not isinstance(v, bytes)}
    return Shown({k: v for k, v in kept.items() if k not in LEFT_OUT}, samples)


def _sample(record: dict[str, Any]) -> Sample:
    mask = np.frombuffer(record["mask"], np.uint8).astype(np.int8)
    turns = np.full(len(mask), -1)
    if of_turns := record.get("turn_tokens"):
        turns[mask == 1] = np.repeat(*np.transpose(of_turns))
    found = Sample(
        np.frombuffer(record["tokens"], "<i4"),
        mask,
        np.frombuffer(record["logprobs"], "<f4"),
        np.frombuffer(record["versions"], "<i4"),
        turns,
    )
    if {len(values) for values in found} != {len(mask)}:
        raise ValueError("tokens, mask, logprobs and versions differ in length")
    return found


def notable(trajectories: list[Shown]) -> list[tuple[str, Shown]]:
    """(why, trajectory) of the few that show most of a step, none twice: with the best and the
    worst reward, the one of the most tokens, and one that failed."""
    if not trajectories:
        return []
    failed = [t for t in trajectories if t.failed]
    wanted = [
        ("best", max(trajectories, key=lambda t: t.reward)),
        ("worst", min(trajectories, key=lambda t: t.reward)),
        ("longest", max(trajectories, key=lambda t: t.made)),
        *(("failed", t) for t in failed[:1]),
    ]
    found: dict[str, tuple[str, Shown]] = {}
    for why, trajectory in wanted:
        before, _ = found.get(trajectory.id, ("", None))
        found[trajectory.id] = (f"{before}, {why}" if before else why, trajectory)
    return list(found.values())


class Texts:
    """Tokens as text, by the tokenizer of the run's model."""

    def __init__(self, run_dir: Path):
        self._tokenizer = None
        path = _model_folder(Path(run_dir)) / "tokenizer.json"
        if path.is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
        self.missing = "" if self._tokenizer else f"no {path}, so tokens are shown by their numbers"

    def of(self, tokens) -> str:
        tokens = [int(token) for token in tokens]
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _model_folder(run_dir: Path) -> Path:
    try:
        model = json.loads((run_dir / "config.json").read_text(encoding="utf-8")).get("model") or {}
    except (OSError, ValueError):
        model = {}
    return Path(model.get("snapshot") or model.get("path") or run_dir)
