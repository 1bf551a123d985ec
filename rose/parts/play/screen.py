"""Draw a game in the terminal.

`Board` is for environments that show a map. It draws a frame for each turn, with the map on the
left and the policy's text on the right. On a terminal the frames replace each other. `Script` is
for all other environments. It prints a conversation, with the policy's text as it is generated.
"""

from __future__ import annotations

import asyncio
import re
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rose.agent.chat import ChatFormat
from rose.agent.envs.base import Start, Step
from rose.config import Env
from rose.observe.terminal import plain
from rose.parts.play.typed import show_call

PAUSE_S = 0.5  # seconds between two frames on a terminal, so that eyes can follow
MAP_WIDTH = 34  # characters of the longest line below a lake, so that columns don't move
SHOWN = 12  # last turns whose text is beside the map

# Environment that shows a map -> first character of a symbol -> style of the symbol.
MAPS = {
    "frozen_lake": {
        "P": "bold black on #ffd166",
        "F": "#3d6b8c on #cdeafd",
        "H": "bold #cdeafd on #12355b",
        "G": "bold white on #2a9d55",
    },
    "minigrid": {
        "#": "#6b6b6b on #6b6b6b",
        ".": "#8a8a8a",
        "G": "bold white on #2a9d55",
        "L": "bold white on #d1495b",
        "K": "bold #ffd166",
        "B": "bold #66aaff",
        "X": "bold #c58af9",
        **dict.fromkeys("DCO", "bold white on #8a5a2b"),
        **dict.fromkeys("<>^v", "bold black on #ffd166"),
    },
}
# Marks such as <|im_start|> or <s>, which a chat template writes around messages.
MARKS = re.compile(r"<\|[^<>|\s]*\|>|</?s>|\[/?INST\]")
GENERATION = re.compile(r"\s*\bassistant\s*$")  # the role before the answer


class Screen(Protocol):
    """The display of one game."""

    def opening(self, start: Start) -> None:
        """Show the environment's first messages, and its map."""

    def waiting(self, why: str) -> None:
        """Show why the policy doesn't answer yet."""

    def saying(self, text: str) -> None:
        """Show the policy's turn so far."""

    async def said(self, text: str, chat: ChatFormat) -> None:
        """Show the policy's whole turn."""

    def observed(self, step: Step) -> None:
        """Show the environment's answer."""

    def refused(self, reply: str) -> None:
        """Show the agent loop's answer to a turn without a readable call."""

    def call(self, number: str, context: str, answer: str) -> None:
        """Show a program's call of the policy: all that it sent, and the answer."""

    def frame(self) -> None:
        """Show the state of the game, before a person types."""

    def note(self, text: str) -> None:
        """Show a remark of this command."""

    def ended(self, verdict: Text) -> None:
        """Show the last state, and how the game ended."""

    def close(self) -> None:
        """Release the terminal; safe when called twice."""


def screen_for(env: Env, console: Console, human: bool = False) -> Screen:
    """Return a new screen for the environment. On a terminal its frames replace each other, but not
    if a person plays, whose typed lines would be lost."""
    if env.name in MAPS:
        return Board(console, MAPS[env.name], animated=console.is_terminal and not human)
    return Script(console)


def words_of(text: str, start: Start, chat: ChatFormat) -> Text:
    """Return the text of the policy's turn, with its calls in Python's notation."""
    reading = chat.read(text, start.tools)
    if reading.problem or not reading.calls:
        return plain(text.strip() or "(nothing)", "red" if start.tools else "green")
    calls = [plain(show_call(call), "bold green") for call in reading.calls]
    spoken = [plain(each, "dim") for each in (reading.thought, reading.content) if each]
    return Text("\n").join([*spoken, *calls])


class Board:
    """A map with the policy's turns beside it."""

    def __init__(self, console: Console, styles: dict[str, str], animated: bool) -> None:
        self._console, self._styles = console, styles
        quiet = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
        self._live = Live(console=console, **quiet) if animated else None
        self._map, self._turns, self._start = "", 0, Start([])
        self._said: list[tuple[str, Text]] = []  # turn and words

    def opening(self, start: Start) -> None:
        self._start = start
        for message in start.messages[:-1]:
            self._console.print(plain(message["content"], "dim"), soft_wrap=True)
        self._console.print()
        self._map = start.messages[-1]["content"]
        if self._live is not None and len(self._map.splitlines()) + 2 > self._console.height:
            self._live = None
        if self._live is not None:
            self._live.start()
            self._update()

    def waiting(self, why: str) -> None:
        if self._live is not None:
            self._update(Text(why, "dim"))

    def saying(self, text: str) -> None:
        """Show nothing yet: a move is short, and `said` shows all of it."""

    async def said(self, text: str, chat: ChatFormat) -> None:
        self._turns += 1
        words = words_of(text, self._start, chat)
        self._said.append((str(self._turns), words))
        if self._live is None:
            self._print_beside(Text(f"turn {self._turns}: ", "dim") + words)
            self._console.print()
        else:
            self._update()
            await asyncio.sleep(PAUSE_S)

    def observed(self, step: Step) -> None:
        self._map = step.observation
        if self._live is not None:
            self._update()

    def refused(self, reply: str) -> None:
        """Show nothing more: the turn's text is red already."""

    def call(self, number: str, context: str, answer: str) -> None:
        """Do nothing: environments with a map run no programs."""

    def frame(self) -> None:
        self._print_beside(Text())

    def note(self, text: str) -> None:
        self._console.print(plain(text, "dim"), soft_wrap=True)

    def ended(self, verdict: Text) -> None:
        if self._live is None:
            self._print_beside(verdict)
        else:
            self._update(verdict)
            self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_beside(self, words: Text) -> None:
        """Print the map and `words` beside it, line by line. Nothing is padded or wrapped."""
        left, right = self._drawn().split(), words.split()
        width = max(MAP_WIDTH, *(line.cell_len for line in left)) + 3
        for row in range(max(len(left), len(right))):
            line = left[row] if row < len(left) else Text()
            if row < len(right):
                line = line + " " * (width - line.cell_len) + right[row]
            line.rstrip()
            self._console.print(line, soft_wrap=True)

    def _update(self, last: Text | None = None) -> None:
        """Redraw the frame: the map, and beside it the last turns and `last`."""
        lines = Table.grid(padding=(0, 2))
        for number, words in self._said[-SHOWN:]:
            lines.add_row(Text(number, "dim"), words)
        table = Table.grid(padding=(0, 3))
        table.add_row(self._drawn(), Group(lines, *([] if last is None else [last])))
        self._live.update(table, refresh=True)

    def _drawn(self) -> Text:
        """Return the map with a style for each cell; the lines around it are dim."""
        lines = []
        for line in self._map.splitlines():
            cells = line.split(" ")
            if all(cell[:1] in self._styles and len(cell) < 3 for cell in cells):
                styled = [plain(f"{cell:^3}", self._styles[cell[0]]) for cell in cells]
                lines.append(Text("").join(styled))
            else:
                lines.append(plain(line, "dim"))
        return Text("\n").join(lines)


class Script:
    """A conversation between the environment, or a program, and the policy."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._turns, self._speaking = 0, False
        self._shown = 0  # characters of this turn that are printed
        self._context = ""  # messages and answer of a program's last call

    def opening(self, start: Start) -> None:
        for message in start.messages:
            self._part(message["role"], message["content"])

    def waiting(self, why: str) -> None:
        self.note(why)

    def saying(self, text: str) -> None:
        self._begin()
        whole = text.rstrip("\ufffd")  # no half character at the end
        self._console.out(str(plain(whole[self._shown :])), style="green", end="", highlight=False)
        self._shown = max(self._shown, len(whole))

    async def said(self, text: str, chat: ChatFormat) -> None:
        self._begin()
        self._console.out(str(plain(text[self._shown :])), style="green", highlight=False)
        self._speaking = False

    def observed(self, step: Step) -> None:
        for text in step.observations or (step.observation,):
            if text:
                self._part("environment", text)

    def refused(self, reply: str) -> None:
        self._part("agent loop", reply)

    def call(self, number: str, context: str, answer: str) -> None:
        """Show the call. If its context continues that of the last call, show only the new part."""
        fresh = context.removeprefix(self._context)
        self._context = context + answer
        sent = GENERATION.sub("", MARKS.sub("", fresh)).strip()
        self._part(f"program, call {int(number) + 1}", sent)
        self._part("policy", answer.strip(), "green")

    def frame(self) -> None:
        """Show nothing: the whole conversation is above."""

    def note(self, text: str) -> None:
        self._console.print(plain(text, "dim"), soft_wrap=True)

    def ended(self, verdict: Text) -> None:
        self._console.print(Text("\n") + verdict)

    def close(self) -> None:
        """Do nothing: this screen doesn't hold the terminal."""

    def _begin(self) -> None:
        """Print the policy's label before the first text of a turn."""
        if not self._speaking:
            self._speaking, self._shown = True, 0
            self._turns += 1
            self._label(f"policy, turn {self._turns}", "bold green")

    def _part(self, who: str, text: str, style: str = "") -> None:
        self._label(who, "bold green" if who == "policy" else "bold blue")
        self._console.print(plain(text, style), soft_wrap=True)

    def _label(self, who: str, style: str) -> None:
        self._console.print(Text(f"\n{who}:", style))
