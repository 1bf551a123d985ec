"""Play episodes of one `verifiers` environment. This program runs in that library's own virtual
environment, as `PYTHON -P _verifiers_player.py`, and imports nothing of ROSE.

The first line of the standard input has the settings (`Verifiers.settings` in verifiers.py). The
first line of the standard output has the numbers of tasks and their digest, or an error. Each
further input line starts an episode or cancels one, and each output line is an episode's reward or
error. Any number of episodes run at once. The program ends with its input. For a role without a
program the library would install a chat program from the network and start it for each episode;
instead, `Chat` runs that loop in this process.
"""

import asyncio
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import random
import sys

WANTED = "0.4."  # the library's version; 0.1 to 0.3 have other classes
HARNESS = "rose_chat"  # the name under which the library imports this file


class Refused(Exception):
    """The value of env.args.`key` can't be used."""

    def __init__(self, key, text):
        super().__init__(text)
        self.key = key


try:
    found = importlib.metadata.version("verifiers")
    if not found.startswith(WANTED):
        raise Refused("python", f"it has verifiers {found}; {WANTED}x is needed")
    import httpx
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.utils.compile import resolve_runtime_config, validate_pairing
except (ImportError, Refused) as error:
    print(json.dumps({"key": "python", "error": f"{error}"}))
    sys.exit(1)

__all__ = ["Chat"]
ENDS = ("context_length_exceeded", "turn_limit")  # gateway errors that end an episode regularly


class ChatConfig(vf.HarnessConfig):
    id: str = HARNESS


class Chat(vf.Harness[ChatConfig]):
    """Calls the policy, and tools for it, until an answer has no call. The policy gets no shell."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Run the loop for one episode. The library calls this."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            tools, places, servers = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            while (said := await self._ask(http, endpoint, secret, body)) is not None:
                messages.append(said)
                for call in said.get("tool_calls") or ():
                    text = await self._use(servers, places, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
                if not said.get("tool_calls"):
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _ask(self, http, endpoint, secret, body):
        """Return the policy's message; None once its context or its calls are used up."""
        headers = {"Authorization": f"Bearer {secret}"}
        answer = await http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        if answer.status_code != 200:
            if any(code in answer.text for code in ENDS):
                return None
            raise RuntimeError(f"the policy's call failed ({answer.status_code}): {answer.text}")
        said = answer.json()["choices"][0]["message"]
        return {key: value for key, value in said.items() if value is not None}

    async def _use(self, servers, places, function):
        """Return the tool's answer, or an error for the policy if it can't be called."""
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            return f"error: the arguments are no JSON: {error}"
        if function["name"] not in places:
            return f"error: unknown tool {function['name']!r}; known are {', '.join(places)}"
        if not isinstance(arguments, dict):
            return "error: the arguments must be a JSON object"
        return await call_mcp(servers, places, function["name"], arguments)


class Player:
    """An environment with its tasks: `train` and `held_out`. The policy plays the one role that has
    no `client` of its own. Raises `Refused`."""

    def __init__(self, settings):
        """`settings["held_out"]` has other arguments of the tasks, or the share of tasks to take.
        The other settings are as in `Verifiers.settings`."""
        self.settings, self.id = settings, settings["id"]
        config = self._config(settings["args"])
        try:
            self.env = vf.load_environment(config)
        except Exception as error:
            raise Refused("env", f"{self.id} can't be made of it: {_text(error)}") from error
        roles = agent_config_fields(config)
        trained = [name for name, role in roles.items() if role.client is None]
        if len(trained) != 1:
            raise Refused(
                "env",
                f"{self.id} has the roles {', '.join(roles)}, of which {len(trained)} have no "
                "`client` of their own; exactly one must have none: the one that is trained",
            )
        self.role = trained[0]
        held_out = settings["held_out"]
        if isinstance(held_out, dict):
            self.train = self._tasks(self.env.taskset, "args")
            other = self._config(settings["args"] | held_out).taskset
            self.held_out = self._tasks(vf.load_taskset(other), "held_out")
        else:
            self.train, self.held_out = self._split(held_out)
        self._check(roles[self.role])

    def _config(self, args):
        """Return the environment's configuration. Roles without a program of their own get `Chat`,
        and roles without a runtime of their own run as subprocesses here."""
        raw = self.settings["env"] | {"taskset": args | {"id": self.id}}
        try:
            vf.import_taskset(self.id)
        except ModuleNotFoundError as error:
            raise Refused("id", f"no such environment is installed: {error}") from error
        except Exception as error:
            raise Refused("id", f"it can't be imported: {_text(error)}") from error
        try:
            config = vf.resolve_env_config(raw)
            bundled = vf.default_harness_id(self.id) == self.id
        except Exception as error:
            key = "args" if self.settings["args"] and "taskset" in str(error) else "env"
            raise Refused(key, f"{self.id} refuses it: {_text(error)}") from error
        changes = {}
        for name, role in agent_config_fields(config).items():
            harness = role.harness
            ours = not bundled if harness is None else harness.id == "null"
            here = "runtime" not in role.model_fields_set
            changes[name] = role.model_copy(
                update=({"harness": ChatConfig()} if ours else {})
                | ({"runtime": vf.SubprocessConfig()} if here else {})
            )
        return config.model_copy(update=changes)

    def _tasks(self, taskset, key):
        """Return the tasks of a taskset, `most_tasks` at most, in the same order every time."""
        most = self.settings["most_tasks"]
        try:
            tasks = list(itertools.islice(taskset, most))
        except Exception as error:  # any error of the loader, such as no hub or no file
            raise Refused(key, f"the tasks of {self.id} can't be loaded: {_text(error)}") from error
        if not tasks:
            raise Refused(key, f"{self.id} has no tasks with it")
        return sorted(tasks, key=_digest)  # a seed means the same task in every process

    def _split(self, share):
        """Return (training, held-out) tasks. A task's content, without its index, decides its side.
        So equal tasks are on one side, and new or reordered tasks don't move other tasks."""
        sides = [], []
        for task in self._tasks(self.env.taskset, "args"):
            sides[int.from_bytes(_digest(task)[:8], "big") < share * 2**64].append(task)
        if not all(sides):
            whole = len(sides[0]) + len(sides[1])
            raise Refused(
                "held_out",
                f"of {whole} tasks of {self.id}, {len(sides[1])} are held out; both sides need "
                "some",
            )
        return sides

    def _check(self, role):
        """Raise `Refused` if the trained role can't play the first training task here."""
        task = self.train[0]
        tools = [*task.toolsets(task.config), *self.env.taskset.toolsets(self.env.taskset.config)]
        try:
            runtime = resolve_runtime_config(role.runtime, task)
            harness = role.harness or self.env._default_harness
            validate_pairing(vf.load_harness(harness), type(task), runtime, tools=tools)
        except (TypeError, ValueError) as error:
            raise Refused("id", f"{self.id} can't be played here: {error}") from error

    async def play(self, order):
        """Play an episode and return its reward and metrics, or its error."""
        tasks = self.held_out if order["seed"] % 2 else self.train
        task = tasks[random.Random(order["seed"]).randrange(len(tasks))]
        given = {
            "base_url": f"{order['url']}/v1",
            "api_key_var": "ROSE_NO_KEY",  # unset, as each episode's own key is sent as a header
            "headers": {"x-api-key": order["key"]},
        }
        if self.settings["renderer"] is None:
            client = vf.EvalClientConfig(**given)
        else:
            client = vf.TrainClientConfig(
                **given, renderer=self.settings["renderer"], renderer_model_name=order["tokenizer"]
            )
        context = vf.ModelContext(model="policy", client=client)
        episode = await self.env.run_episode(task, context)
        traces = [trace for trace in episode.traces if trace.agent.name == self.role]
        errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        late = [t.stop_condition for t in traces if t.stop_condition in LATE]
        rewards = [value for t in traces for value in t.rewards.values() if value is not None]
        if not episode.ok or late or not rewards:
            said = "; ".join([f"{e.type}: {e.message}" for e in errors] + late)
            return {"error": said or "the environment recorded no reward"}
        metrics = {}
        for trace in traces:
            metrics |= {name: v for name, v in trace.metrics.items() if v is not None}
            metrics |= {name: r.value for name, r in trace.rewards.items() if r is not None}
        return {"reward": sum(t.reward for t in traces) / len(traces), "metrics": metrics}


# Stop conditions of the library with which a reward is incomplete
LATE = ("setup_timeout", "finalize_timeout", "scoring_timeout")


def _digest(task):
    """Return a digest of the task's content, without its index."""
    content = task.data.model_dump(mode="json", exclude={"idx"})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()


def _plain(value):
    """Convert a number or bool of NumPy or torch to Python's. Raises `TypeError` for others."""
    if callable(getattr(value, "item", None)):
        return value.item()
    raise TypeError(f"{value!r:.80} is no JSON")


def _text(error):
    return f"{type(error).__name__}: {error}"


async def serve(player, answer):
    """Play the episodes requested on the standard input, until it ends."""
    loop, running = asyncio.get_running_loop(), {}
    orders = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)

    async def play_one(order):
        try:
            said = await player.play(order)
        except asyncio.CancelledError:
            said = {"error": "cancelled"}
        except (Exception, SystemExit) as error:
            said = {"error": _text(error)}
        running.pop(order["name"], None)
        answer({"name": order["name"]} | said)

    line = await orders.readline()
    if not line:
        return
    async with player.env.serving():
        # Without the shared interception server each episode gets a server and a client of its own,
        # which end with it. The shared one would keep a client for every key.
        player.env._interception = None
        while line:
            order = json.loads(line)
            if "cancel" in order:
                if order["cancel"] in running:
                    running[order["cancel"]].cancel()
            else:
                running[order["name"]] = asyncio.create_task(play_one(order))
                await asyncio.sleep(0)  # lets the task begin; else a cancel has no answer
            line = await orders.readline()
        for task in [*running.values()]:
            task.cancel()


def main():
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stderr in place of stdout, so that environments' prints are no answers

    def answer(message):
        try:
            text = json.dumps(message, default=_plain)
        except (TypeError, ValueError) as error:  # An environment's own metrics may be anything.
            text = json.dumps({"name": message.get("name"), "error": _text(error)})
        out.write(text + "\n")
        out.flush()

    sys.modules[HARNESS] = sys.modules["__main__"]
    try:
        player = Player(json.loads(sys.stdin.buffer.raw.readline()))
    except Refused as error:
        answer({"key": error.key, "error": str(error)})
        return 1
    tasks = b"".join(map(_digest, [*player.train, *player.held_out]))
    counts = {"train": len(player.train), "held_out": len(player.held_out)}
    answer(counts | {"tasks": hashlib.sha256(tasks).hexdigest()})
    with asyncio.Runner() as runner:
        task = runner.get_loop().create_task(serve(player, answer))
        # A SystemExit in an environment stops the loop, which would cancel all other episodes.
        while not task.done():
            with contextlib.suppress(SystemExit):
                runner.get_loop().run_until_complete(task)
        task.result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
