"""A shell in a sandbox: the agent calls `bash`, and hidden tests judge the final state.

Tasks are folders (`_tasks`) or easy built-in tasks for small models, the rungs of a ladder
(`_ladder`). The tests run when the agent answers without a call, and when its turns are used up. An
episode resumes from a checkpoint or, if the host keeps none, by repeating its actions.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from rose import processes
from rose.agent.envs import _ladder
from rose.agent.envs._ladder import BASH, function_tool
from rose.agent.envs.base import Action, Start, Step, ToolCall
from rose.config import ConfigError
from rose.config.common import Count, Positive
from rose.parts.sandbox import Limits, Sandbox, SandboxError, Spec
from rose.parts.sandbox.backend import Fresh
from rose.parts.sandbox.checkpointer import Checkpointer, Restored, restore
from rose.parts.sandbox.envs import _tasks, _undo
from rose.parts.sandbox.envs._host_store import HostStore, open_store
from rose.parts.sandbox.probe import AUTO, BACKENDS, choose

LADDER = "ladder"
VERDICT = "/logs/verifier/reward.txt"
SYSTEM = (
    "You work in a shell on a Linux machine without network, in {}. Call bash to run commands; its "
    "session keeps variables and the working directory. When the task is done, answer without a "
    "call: then it is tested."
)
FILE_BYTES = 1 << 20
MOST_WARNINGS = 256  # most warnings that are remembered as printed
SPARE_MIB = 64  # MiB of memory that a sandbox needs beyond its disk, which is in memory


def _stopped_text(task: _tasks.Task) -> str:
    return (
        f"task {task.name}: its tests were stopped: they don't end within verifier.timeout_sec="
        f"{task.verifier_s:g}, or never stop printing"
    )


@functools.lru_cache(MOST_WARNINGS)
def _warn(words: str) -> None:
    """Print a warning, unless it was printed recently: the cache suppresses repeated calls."""
    print(words, flush=True)


EDIT = function_tool(
    "edit_file", "Replace old, which the file has once, by new.", "path", "old", "new"
)
UNDO = function_tool("undo", "Take back the last command, or as many as commands says.")
UNDO["function"]["parameters"]["properties"]["commands"] = {"type": "integer", "minimum": 1}


class Terminal:
    """An environment with the tasks of the folder `tasks`, or with `rungs` if `tasks` is "ladder".
    `edit_file` and `undo` add tools. A command may take `command_s` seconds and show
    `output_bytes`. The reward is the tests' verdict; 1 is a success. Raises `ConfigError`."""

    requires_tool = False
    paths = ("tasks",)

    def __init__(
        self,
        tasks: str = LADDER,
        rungs: list[str] = _ladder.RUNGS,
        backend: str = AUTO,
        edit_file: bool = False,
        undo: bool = False,
        command_s: Positive = 30.0,
        output_bytes: Count = 4000,
        memory_mib: Count = 1024,
        disk_mib: Count = 256,
        processes: Count = 128,
        cpus: Positive = 1.0,
    ):
        if backend not in (AUTO, *BACKENDS):
            raise ConfigError(
                f"env.args.backend={backend!r}: there are {AUTO}, {', '.join(BACKENDS)}"
            )
        if not rungs or set(rungs) - set(_ladder.RUNGS):
            known = ", ".join(_ladder.RUNGS)
            raise ConfigError(f"env.args.rungs={rungs!r}: a list of some of {known}")
        self._place, self.tasks = tasks, None if tasks == LADDER else _tasks.load(str(tasks))
        self.doubt = _tasks.doubt(*self.tasks) if self.tasks else ""
        self.training_doubt = _tasks.foreign_files_doubt(*self.tasks) if self.tasks else ""
        self.rungs, self.backend, self.undo = tuple(rungs), backend, undo
        chosen = [BASH, *[EDIT] * edit_file, *[UNDO] * undo]
        self.tools = {tool["function"]["name"]: tool for tool in chosen}
        self.command_s, self.output_bytes = float(command_s), output_bytes
        self.limits = Limits(memory_mib, disk_mib, processes=processes, cpus=float(cpus))
        self.box: Sandbox | None = None
        self._states: _undo.Undo | None = None
        self._task: _tasks.Task | None = None
        self._rung: _ladder.Rung | None = None
        self._until = 0.0
        self._shown = ""  # the last command's output
        self._kept: Checkpointer | None = None
        self._store: tuple[HostStore, str] | None = None  # (store, name in it)
        self._before: dict[str, float] = {}  # costs of checkpoints before the last `resume`
        self._seed = self._turn = 0
        self._reference: str | None = None  # reference of the newest checkpoint
        self._since: list[dict[str, Any]] = []  # calls after that, with their observations
        self._lost = ""  # state that a restore lost, for the agent's next observation

    def preflight(self, step_timeout_s: float) -> str:
        """Check the tasks' limits and this machine before a run. Return a text about the machine's
        sandboxes and what they lack. Raises `ConfigError`."""
        if self.command_s >= step_timeout_s:
            raise ConfigError(
                f"env.args.command_s={self.command_s:g}: below env.step_timeout_s="
                f"{step_timeout_s:g}, which bounds the whole step"
            )
        asked = {"env.args": ((), 0.0)}
        for task in {t for split in self.tasks or () for t in split}:
            asked[f"task {task.name}"] = (task.limits, task.verifier_s)
        broken = []
        for name, (limits, verifier_s) in sorted(asked.items()):
            made = replace(self.limits, **dict(limits))
            if made.disk_mib + SPARE_MIB > made.memory_mib:
                broken.append(
                    f"{name}: a disk of {made.disk_mib} MiB takes memory of "
                    f"{made.disk_mib + SPARE_MIB} MiB at least, not {made.memory_mib}"
                )
            if verifier_s >= step_timeout_s:
                broken.append(
                    f"{name}: verifier.timeout_sec={verifier_s:g} is not below "
                    f"env.step_timeout_s={step_timeout_s:g}"
                )
        if broken:
            more = f"; and {len(broken) - 8} more" if broken[8:] else ""
            where = f"env.args.tasks={self._place!r}: " if self.tasks else ""
            raise ConfigError(where + "; ".join(broken[:8]) + more)
        try:
            found = choose(self.backend)
            problem = _undo.problem(self.backend) if self.undo else ""
        except SandboxError as error:
            raise ConfigError(f"env.args.backend={self.backend!r}: {error}") from None
        if problem:
            raise ConfigError(f"env.args.undo=true: {problem}; false, or another backend")
        return found.account

    async def trial(self) -> tuple[int, list[str]]:
        """Run each task's tests once on its initial state. Return the number of tasks, and an error
        for each task whose tests pass there, are stopped or can't run."""
        tasks = sorted({t for split in self.tasks or () for t in split}, key=lambda t: t.name)
        gate = asyncio.Semaphore(processes.cores())

        async def try_one(task: _tasks.Task) -> str:
            env = copy.copy(self)
            env._task = task
            async with gate:
                try:
                    await env._open()
                    shell = await env.box.run(":", self.command_s)
                    done, reward = await env._tested(task)
                except (SandboxError, OSError) as error:  # such as a disk too small for its files
                    return f"task {task.name}: {error}"
                finally:
                    await env.close()
            if shell.code != 0:
                return f"task {task.name}: its shell runs no command: {shell.words()}"
            if done.code is None:
                return _stopped_text(task)
            return f"task {task.name} is passed before its agent begins" if reward >= 1 else ""

        return len(tasks), [words for words in await asyncio.gather(*map(try_one, tasks)) if words]

    def _draw(self, seed: int) -> None:
        """Choose the episode's task or rung."""
        self._seed = seed
        if self.tasks is None:
            self._rung = _ladder.draw(seed, self.rungs)
        else:
            self._task = self._task_of(seed)

    def _task_of(self, seed: int) -> _tasks.Task:
        return random.Random(seed).choice(self.tasks[seed % 2])

    def task_name(self, seed: int) -> str:
        return f"task {self._task_of(seed).name}" if self.tasks is not None else ""

    def starts(self) -> Iterator[tuple[str, Start]]:
        """Yield the name and the first messages of every task."""
        for task in dict.fromkeys(chain(*(self.tasks or ()))):
            system = SYSTEM.format(task.workdir)
            yield f"task {task.name}", self._first_messages(system, task.instruction)

    def _first_messages(self, system: str, instruction: str) -> Start:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": instruction}]
        return Start(messages, list(self.tools.values()))

    async def reset(self, seed: int) -> Start:
        await self.close()
        self._draw(seed)
        return await self._open()

    async def _open(self) -> Start:
        """Start a sandbox with the drawn task's files. Return the first messages."""
        if (rung := self._rung) is not None:
            spec, files = Spec(limits=self.limits), {n: t.encode() for n, t in rung.files.items()}
            system, instruction, time_s = _ladder.SYSTEM, rung.instruction, _tasks.TIMEOUT_S
        else:
            task = self._task
            limits = replace(self.limits, **dict(task.limits))
            spec = Spec(image=task.image, workdir=task.workdir, limits=limits)
            system, instruction = SYSTEM.format(task.workdir), task.instruction
            files, time_s = task.files(), task.agent_s
        self.box = await Sandbox.start(spec, self.backend)
        for name, data in files.items():
            await self.box.write_file(f"{spec.workdir}/{name}", data)
        self._states = _undo.Undo() if self.undo else None
        self._until, self._shown = time.monotonic() + time_s, ""
        await self._start_checkpoints()
        return self._first_messages(system, instruction)

    async def step(self, action: Action) -> Step:
        call, before = action.call, self.box
        if call is None or call.name not in self.tools or self._kept is None:
            return await self._act(action)
        self._kept.engine.urge(self._kept.name, late=True)
        made = await self._act(action)
        if call.name != "undo" or self.box is not before:
            self._since.append(asdict(call) | {"showed": made.observation})
        if self._lost and not made.done:
            words, self._lost = f"The machine was restored: {self._lost}\n", ""
            made = replace(made, observation=words + made.observation)
        return made

    async def _act(self, action: Action) -> Step:
        """Carry out an action. `step` adds the records for checkpoints."""
        call = action.call
        if call is None:
            return await self.end()
        if call.name not in self.tools:
            return Step(
                f"There is no tool {call.name[:40]!r}, only {', '.join(self.tools)}.", invalid=True
            )
        if call.name == "undo":
            return await self._undo(call.arguments)
        wanted = self.tools[call.name]["function"]["parameters"]["required"]
        given = call.arguments
        if set(given) != set(wanted) or not all(isinstance(v, str) for v in given.values()):
            words = f"{call.name} takes {', '.join(wanted)}: text."
            return Step(words, invalid=True)
        left = self._until - time.monotonic()
        if left <= 0:
            return await self.end()
        if self._states is not None:
            await self._states.keep(self.box, given.get("command", "edit_file"))
        if call.name == "edit_file":
            return await self._edit(**given)
        result = await self.box.run(given["command"], min(self.command_s, left), self.output_bytes)
        self._shown = result.output
        return Step(result.words())

    async def _undo(self, given: dict[str, Any]) -> Step:
        commands = given.get("commands", 1)
        if set(given) - {"commands"} or type(commands) is not int or commands < 1:
            return Step("undo takes commands: how many, 1 or more.", invalid=True)
        before = self.box
        self.box, words = await self._states.back(before, commands)
        if self.box is not before:
            self._shown = ""
            if self._kept is not None:
                await self._kept.move(self.box)
        return Step(words, invalid=self.box is before)

    # ---------------------------------------------------------------------- checkpoints

    checkpoint_store = staticmethod(open_store)

    def keep_checkpoints(self, store: HostStore, name: str) -> None:
        """Enable `checkpoint` and `resume` (base.py). Checkpoints are stored under `name`."""
        self._store = (store, name)
        self.checkpoint, self.resume = self._checkpoint, self._resume

    async def _start_checkpoints(self, origin: Restored | None = None) -> None:
        """Begin checkpoints of `box`, if the host keeps any. `origin`: as in `Checkpointer`."""
        if self._store is not None:
            store, name = self._store
            self._kept = Checkpointer(self.box, store, name, store.policy, origin)
            await self._kept.begin()

    async def _checkpoint(self) -> bytes:
        """Take a checkpoint and return the state for `resume`: the newest checkpoint's reference,
        and the calls after it if this turn has none."""
        self._turn += 1
        await self._kept.after_turn(self._turn)
        if (saved := self._kept.saved(self._turn)) is not None:
            self._reference, self._since = saved.decode(), []
        state = {"seed": self._seed, "turn": self._turn, "shown": self._shown}
        state |= {"left_s": self._until - time.monotonic(), "stats": self._costs()}
        state |= {"reference": self._reference, "since": self._since}
        return json.dumps(state).encode()

    async def _resume(self, saved: bytes) -> None:
        """Restore the checkpoint of the state `saved` and repeat the calls after it. Raises
        `SandboxError` if exactly this state can't be restored. The agent's next observation names
        lost processes. States for undo are lost."""
        state = json.loads(saved)
        await self.close()
        if state["reference"] is None:
            await self.reset(state["seed"])
        else:
            self._draw(state["seed"])
            engine = self._store[0]
            made = await restore(state["reference"].encode(), engine, self.backend, exact=True)
            self._lost = made.box.lost
            self.box, self._states = made.box, _undo.Undo(resumed=True) if self.undo else None
            await self._start_checkpoints(made)
        self._turn, self._reference = state["turn"], state["reference"]
        self._before = state["stats"]
        self._until = time.monotonic() + self.command_s * (1 + len(state["since"]))
        lost, self._lost = self._lost, ""
        for each in state["since"]:
            call = ToolCall(each["name"], each["arguments"])
            showed = (await self.step(Action("", call))).observation
            if showed != each["showed"]:
                words = f"{str(call.arguments)[:200]} showed {each['showed'][:200]!r}, and now "
                raise SandboxError(f"a call can't be repeated: {words}{showed[:200]!r}")
        self._lost = lost
        self._until, self._shown = time.monotonic() + state["left_s"], state["shown"]

    async def settled(self) -> bool:
        """Return whether other hosts can restore the newest checkpoint. If it is still being
        stored, wait for that for a limited time."""
        if self._reference is None:
            return True
        return await self._kept.settled(json.loads(self._reference)["turn"])

    def _costs(self) -> dict[str, float]:
        own = self._kept.stats if self._kept is not None else {}
        return {name: value + self._before.get(name, 0) for name, value in own.items()}

    @property
    def stats(self) -> dict[str, float]:
        """The costs of this episode's checkpoints (`Checkpointer.stats`)."""
        return {f"checkpoint_{name}": float(value) for name, value in self._costs().items()}

    async def _edit(self, path: str, old: str, new: str) -> Step:
        path, old, new = (t.encode(errors="replace").decode() for t in (path, old, new))
        try:
            data = await self.box.read_file(path, FILE_BYTES + 1)
            if len(data) > FILE_BYTES:
                words = f"{path[:200]}: edit_file takes files of {FILE_BYTES >> 20} MiB at most."
                return Step(words, invalid=True)
            count = data.count(old.encode()) if old else 0
            if count != 1:
                return Step(
                    f"{path[:200]} has old {count} times; it must have it once.", invalid=True
                )
            made = data.replace(old.encode(), new.encode())
            await self.box.write_file(path, made)
        except OSError as error:
            return Step(f"{path[:200]}: {error.strerror}", invalid=True)
        return Step("Done.")

    async def end(self) -> Step:
        """Judge the current state, also when the turns are used up, and return the last step."""
        if self._rung is not None:
            reward = float(await self._rung_reached(self._rung))
        else:
            done, reward = await self._tested(self._task)
            if done.code is None:
                _warn(_stopped_text(self._task))
        return Step("", reward=reward, done=True, success=reward >= 1)

    async def _rung_reached(self, rung: _ladder.Rung) -> bool:
        if not rung.target:
            return rung.expected in self._shown
        try:
            data = await self.box.read_file(f"{self.box.spec.workdir}/{rung.target}")
        except OSError:
            return False
        return data == rung.expected.encode()

    async def _tested(self, task: _tasks.Task) -> tuple[Fresh, float]:
        """Run the task's tests. Return their result and the verdict, 0 to 1."""
        task.verify()
        folder, argv = str(task.folder / "tests"), ["/bin/bash", "/tests/test.sh"]
        done = await self.box.check(argv, folder, collect=(VERDICT,), wait_s=task.verifier_s)
        if done.code is None or done.code < 0:  # killed, so the verdict may be faked
            return done, 0.0
        written = done.files.get(VERDICT)
        if written is None:
            return done, float(done.code == 0)
        try:
            return done, min(1.0, max(0.0, float(written)))
        except ValueError:
            return done, 0.0

    async def close(self) -> None:
        box, self.box, self._task, self._rung = self.box, None, None, None
        states, self._states = self._states, None
        self._kept, self._reference, self._since, self._turn = None, None, [], 0
        self._before, self._lost = {}, ""
        if box is not None:
            await box.close()
        if states is not None:
            await states.close()
