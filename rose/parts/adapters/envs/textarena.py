r"""Games of TextArena: the policy alone, or against a random or scripted opponent.

A turn's text is the move, in the form of the game's rules. The observation has the game's messages
to the player since its last turn. TextArena uses the global random number generators of Python and
NumPy. So each game keeps their states for itself, and they are put in place for each of its moves.
Moves are computed in threads, one at a time in the process. Not supported: several policies in one
game, and games that need a download, an API key or a newer Python (refused before the start).
Package: textarena (Guertler et al., 2025, arXiv:2504.11442).
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import textarena as ta
from textarena.envs.registration import ENV_REGISTRY

from rose.agent.envs import _workers
from rose.agent.envs.base import Action, Start, Step
from rose.config import ConfigError
from rose.reward import function

# Games that ask a remote language model, or that are too slow to copy for the random opponent.
EXCEPT = ("MarketEntryGame", "PublicGoodsGame", "SettlersOfCatan")
RAW = "-raw"  # variant of a game without wrappers that repeat the whole history
MOST_PLAYERS = 7
TRIES = 400  # moves that the random opponent tries on a copy of the game before it gives up
TOKEN = re.compile(r"\[[^\[\]\n]{1,30}\]")
_drawing = threading.Lock()  # held while a game uses Python's global generators
PART = re.compile(r"\d|\b[A-Za-z]\b|(?<=\b)[A-Ia-i](?=\d)")


def games() -> list[str]:
    """Return the ids of all games that may be played here."""
    ids = (name.removesuffix(RAW) for name in ENV_REGISTRY if name.endswith(RAW))
    return sorted(name for name in ids if not name.startswith(EXCEPT))


class Textarena:
    """The TextArena game with the id `game`; `options` are its constructor's arguments. `players`:
    null for the fewest possible. `opponent`: random, or file.py:function, which gets observation
    (the text since its last turn), player and seed, and returns a move. `seat`: the policy's player
    number; null draws it.

    The reward is what the game gives the policy's player, -1 to 1; 1 is a win, which counts as
    success. Raises `ConfigError`.
    """

    requires_tool = False
    paths = ("opponent",)

    def __init__(
        self,
        game: str = "TicTacToe-v0",
        opponent: str = "random",
        players: int | None = None,
        seat: int | None = None,
        options: dict[str, Any] | None = None,
    ):
        if game not in games():
            raise ConfigError(
                f"env.args.game={game!r}: no such game; there are {', '.join(games())}"
            )
        self.options = options or {}
        self.players = _players(game, players, json.dumps(self.options, default=str))
        if seat is not None and (type(seat) is not int or not 0 <= seat < self.players):
            raise ConfigError(f"env.args.seat={seat!r}: null, or from 0 to {self.players - 1}")
        if opponent != "random":
            named = {"observation": "", "player": 0, "seed": 0}
            found = _workers.load("env.args.opponent", opponent)
            function.check_call(found, f"env.args.opponent={opponent!r}", **named)
        self.game, self.opponent, self.fixed_seat = game, opponent, seat
        self._game: ta.Env | None = None
        self._generators: tuple = ()
        self._rng = random.Random()

    async def reset(self, seed: int) -> Start:
        self._rng = random.Random(seed)
        self._seed, self._observed = seed, ""
        self.seat = (
            self._rng.randrange(self.players) if self.fixed_seat is None else self.fixed_seat
        )
        self._generators = _generators_of(seed)
        await asyncio.to_thread(self._new_game, seed)
        if await self._others_play():
            raise RuntimeError(f"{self.game} ended before the policy's first turn")
        return Start(messages=[{"role": "user", "content": self._observed.strip()}])

    async def step(self, action: Action) -> Step:
        move = action.answer.strip().encode("utf-8", "replace").decode()
        done = await asyncio.to_thread(self._play, move)
        invalid = self._refused(self.seat)
        done = done or await self._others_play()
        if not done:
            return Step(observation=self._observed.strip() or "Your turn.", invalid=invalid)
        rewards, _ = self._game.close()
        reward = (rewards or {}).get(self.seat, 0.0)
        # After an invalid last move some games give its reason in place of the reward.
        reward = float(reward) if isinstance(reward, int | float) else -1.0
        return Step(
            observation="The game is over.",
            reward=reward,
            done=True,
            success=reward >= 1,
            invalid=invalid,
        )

    async def close(self) -> None:
        self._game = None

    def _new_game(self, seed: int) -> None:
        with self._own_generators():
            self._game = _make_game(self.game, self.options)
            self._game.reset(num_players=self.players, seed=seed % 2**32)

    def _play(self, move: str) -> bool:
        """Play the move. Return whether it ended the game."""
        with self._own_generators():
            return self._game.step(move)[0]

    async def _others_play(self) -> bool:
        """Play the opponents' moves until the policy's turn, and keep its observation in
        `_observed`. Return whether the game ended."""
        while True:
            player, news = self._game.get_observation()
            text = "\n".join(str(each) for sender, each, _ in news or () if sender != player)
            if player == self.seat:
                self._observed = text
                return False
            move = await self._opponents_move(player, text)
            done = await asyncio.to_thread(self._play, move)
            if self._refused(player):
                raise RuntimeError(f"{self.game} refused {move!r} of the opponent {self.opponent}")
            if done:
                return True

    async def _opponents_move(self, player: int, text: str) -> str:
        if self.opponent != "random":
            return await _workers.call(
                self.opponent, observation=text, player=player, seed=self._rng.getrandbits(31)
            )
        return await asyncio.to_thread(self._random_move, player, text)

    def _random_move(self, player: int, text: str) -> str:
        shown_before = [*(str(each) for _, each in self._game.state.logs), text]
        shown = list(dict.fromkeys(token for m in shown_before[-20:] for token in TOKEN.findall(m)))
        for move in _moves(shown, self._rng):
            trial = copy.deepcopy(self._game)
            with self._own_generators(keep=False):
                trial.step(move)
            if not _refused(trial, player):
                return move
        raise RuntimeError(
            f"{self.game}: none of {TRIES} moves like those that its text shows is legal; give "
            "env.args.opponent=file.py:function"
        )

    def _refused(self, player: int) -> bool:
        return _refused(self._game, player)

    @contextmanager
    def _own_generators(self, keep: bool = True) -> Iterator[None]:
        """Context in which Python's and NumPy's global generators have this game's state, one game
        at a time. `keep`: store their state afterwards."""
        with _drawing:
            yield from self._exchange_generators(keep)

    def _exchange_generators(self, keep: bool) -> Iterator[None]:
        others = random.getstate(), np.random.get_state()
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])
        try:
            yield
        finally:
            if keep:
                self._generators = random.getstate(), np.random.get_state()
            random.setstate(others[0])
            np.random.set_state(others[1])


def _refused(game: ta.Env, player: int) -> bool:
    """True if the last move of `player` was against the rules."""
    state = game.state
    again = state.current_player_id == player and getattr(state, "error_count", 0) > 0
    return again or bool(state.game_info[player].get("invalid_move"))


def _moves(shown: list[str], rng: random.Random) -> Iterator[str]:
    """Yield random moves: texts shown in brackets, half of them with other digits and letters."""
    for _ in range(TRIES if shown else 0):
        like = rng.choice(shown)
        yield like if rng.random() < 0.5 else PART.sub(lambda part: _other_part(part[0], rng), like)


def _other_part(part: str, rng: random.Random) -> str:
    if part.isdigit():
        return str(rng.randrange(10))
    first = "A" if part.isupper() else "a"
    return chr(ord(first) + rng.randrange(8))


def _generators_of(seed: int) -> tuple:
    return random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()


def _make_game(game: str, options: dict[str, Any]) -> ta.Env:
    return ta.make(game + RAW, **options)


@functools.cache
def _players(game: str, players: int | None, options: str) -> int:
    """Return a number of players with which the game starts here. `options` is a JSON object.
    Raises `ConfigError` if there is none."""
    error: BaseException = RuntimeError("no number of players")
    before = random.getstate(), np.random.get_state()
    for count in range(1, MOST_PLAYERS + 1) if players is None else [players]:
        try:
            _make_game(game, json.loads(options)).reset(num_players=count, seed=1)
            return count
        except Exception as raised:  # any error, such as a game's assert or a missing file
            if not isinstance(error, SyntaxError | LookupError | OSError | ImportError):
                error = raised
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
    lines = [line.strip(" *") for line in str(error).splitlines() if line.strip(" *")]
    reason = f"{type(error).__name__}: {' '.join(lines)[:300]}"
    raise ConfigError(
        f"env.args.game={game!r}: can't be played here with {players or 'any number of'} players "
        f"and env.args.options={json.loads(options)} ({reason})"
    )
