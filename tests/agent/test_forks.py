"""Tree rollouts: trajectories that fork off each other in an environment host, whose environments
stand where the other stood. Groups, host, loop and environments are the real ones; the policy says
what the name of a turn determines."""

import asyncio
import itertools
import json
import random

import pytest

from rose import protocol as p
from rose.agent.envs.base import Start, Step
from rose.agent.envs.frozen_lake import DIRECTIONS, FrozenLake
from rose.agent.snapshots import Snapshots
from rose.coordinator.control import Bounds, Groups, Task
from tests.agent.hosted import Hosted
from tests.made import result

TREE = ("rollout/branch=tree", "rollout.branch.ways=[2,2]", "rollout.branch.at=[2,3]")


class Rollout:
    """One group on one host. `answer(turn)`: the text of the policy in a turn."""

    def __init__(self, config, chat, tokenizer, answer, seed=8, domain="frozen_lake"):
        self.config, self.chat, self.tokenizer, self.answer = config, chat, tokenizer, answer
        self.groups = Groups(1, {domain: Bounds(9, 0.2, "env")}, True, config.rollout.branch)
        self.task, self.requests, self.failed = Task(domain, seed), [], []

    def run(self, stop=lambda host, request: None):
        """The group, once all are in. `stop` is asked before each answer."""
        return asyncio.run(self._run(stop))

    async def _run(self, stop):
        host = Hosted(self.config, self.chat)
        size = self.config.rollout.group_size
        self.starts = self.groups.open("g0", p.Phase.TRAIN, self.task, size)
        for start in self.starts:
            host.handle(start)
        while True:
            match message := await host.next():
                case p.TurnRequest():
                    self.requests.append(message)
                    stop(host, message)
                    host.handle(self._made(message))
                case p.TrajectoryFailed():
                    self.failed.append(message)
                    after = self.groups.failed_trajectory(message.id, message.group, message.error)
                    host.handle(after.starts[0])
                case p.TrajectoryFinished(trajectory):
                    if (group := self.groups.finished(trajectory)) is not None:
                        return group

    def alone(self, turns):
        """A trajectory of the same task, by itself, which answers what these turns answered."""
        task, left = self.task, iter(turns)
        start = p.StartTrajectory("g0.0", "g0", p.Phase.TRAIN, task.domain, task.seed, 1)

        async def play():
            made = lambda request: self._made(request, next(left))  # noqa: E731
            return await Hosted(self.config, self.chat).play(start, made)

        return asyncio.run(play())[-1].trajectory

    def _made(self, request, as_turn=None):
        text = self.answer(as_turn or request.turn)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        tokens = [*tokens, self.tokenizer.eos_token_id][: request.sampling.max_new_tokens]
        return result(request.turn, tokens, -0.1 * len(request.turn), len(self.requests))


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def wander(turn):
    return call("move", direction=random.Random(turn).choice(DIRECTIONS))


def assert_whole(rollout, group):
    """Every turn was made once, and each trajectory, played by itself from the prompt with the
    turns that it has, is the very same: tokens, rewards and all."""
    names = [request.turn for request in rollout.requests]
    assert len(set(names)) == len(names)
    asked = {request.turn: request for request in rollout.requests}
    for t in group:
        made = [f"{maker}.t{turn}" for turn, maker in enumerate(t.makers)]
        assert made[-1].startswith(f"{t.id}.t") and set(made) <= asked.keys()
        for turn in made:
            assert t.tokens.startswith(asked[turn].tokens)
        same = rollout.alone(made)
        fields = ("tokens", "mask", "reward", "success", "turns", "response_tokens", "truncated")
        fields += ("invalid_calls", "turn_tokens", "turn_rewards")
        for field in fields:
            assert getattr(same, field) == getattr(t, field), (t.id, field)


@pytest.fixture
def lake(make_config, chats, tokenizer):
    """lake(answer, *overrides): a rollout on a lake without holes."""

    def make(answer=wander, *more, group=8, **kwargs):
        sizes = f"rollout.group_size={group} trainer.batch_size={group}"
        ice = "env.args.hole_probability=0.0 env.args.shaping=0.5"
        config = make_config(*TREE, sizes, ice, *more)
        return Rollout(config, chats["tiny"], tokenizer, answer, **kwargs)

    return make


def leaves(first):
    """Return what the leaves of the tree with this first leaf inherit."""
    root, third = f"g0.{first}", f"g0.{first + 2}"
    return [[], [(root, 3)], [(root, 2)], [(root, 2), (third, 1)]]


def test_a_group_is_trees_whose_leaves_share_their_first_turns_token_by_token(lake):
    rollout = lake()
    group = rollout.run()
    assert [t.id for t in group] == [f"g0.{member}" for member in range(8)]
    assert [t.inherited for t in group] == leaves(0) + leaves(4)
    inherited = sum(turns for t in group for _, turns in t.inherited)
    assert len(rollout.requests) == sum(t.turns for t in group) - inherited
    assert len({t.tokens for t in group}) == 8
    assert_whole(rollout, group)


def test_each_forks_turns_may_be_drawn_by_the_trees_name(lake):
    drawn = ("rollout.branch.at=null", "rollout.branch.depth=6", "env.args.slippery=true")
    rollout = lake(wander, *drawn, group=16)
    group = rollout.run()
    assert_whole(rollout, group)
    forks = [start.fork for start in rollout.starts if start.follows]
    assert len(forks) == 12 and set(forks) <= set(range(1, 7)) and len(set(forks)) > 2
    again = lake(wander, *drawn, group=16)
    again.run()
    assert again.starts == rollout.starts


def test_other_leaves_of_a_tree_that_ends_before_it_forks_begin_with_the_prompt(lake, monkeypatch):
    """And what forks off those still does."""
    step, steps = FrozenLake.step, itertools.count()

    async def ends_at_once(self, action):
        made = await step(self, action)
        return made if next(steps) else Step(made.observation, made.reward, done=True)

    monkeypatch.setattr(FrozenLake, "step", ends_at_once)
    rollout = lake(group=4)
    group = rollout.run()
    group.sort(key=lambda t: t.id)
    assert [t.inherited for t in group] == [[], [], [], [("g0.2", 3)]]
    assert group[0].turns == 1 and group[1].turns > 1 and group[2].turns > 3
    assert len({r.turn for r in rollout.requests}) == len(rollout.requests)


def test_a_trajectory_outlives_the_one_that_it_would_fork_off(lake, monkeypatch):
    """That is cancelled, or fails; and what forks off the replacement's siblings still does."""

    def stop(host, request):
        if request.turn == "g0.0.t1":
            host.handle(p.CancelTrajectory("g0.0"))
            [again] = rollout.groups.failed_trajectory("g0.0", "g0", "gone").starts
            host.handle(again)

    rollout = lake(group=4)
    cancelled = rollout.run(stop)
    step, steps = FrozenLake.step, itertools.count()

    async def breaks(self, action):
        if next(steps) == 0:
            raise RuntimeError("broken")
        return await step(self, action)

    monkeypatch.setattr(FrozenLake, "step", breaks)
    failing = lake(group=4)
    for group in (cancelled, failing.run()):
        assert [t.id for t in group] == ["g0.0r1", "g0.1", "g0.2", "g0.3"]
        assert [t.inherited for t in group] == [[], [], [], [("g0.2", 3)]]
    assert [f.id for f in failing.failed] == ["g0.0"] and "broken" in failing.failed[0].error


class Fickle:
    """A walk of six steps that says its number among all environments of this process."""

    requires_tool = False
    made = itertools.count()

    async def reset(self, seed):
        self.number, self.left = next(Fickle.made), 6
        return Start([{"role": "user", "content": "walk"}])

    async def step(self, action):
        self.left -= 1
        return Step(f"{self.number} walked", done=self.left == 0)

    async def close(self):
        pass


class Saved(Fickle):
    async def checkpoint(self):
        return json.dumps([self.number, self.left]).encode()

    async def resume(self, saved):
        self.number, self.left = json.loads(saved)


def test_an_environment_that_answers_otherwise_the_second_time_is_a_failure(lake, monkeypatch):
    monkeypatch.setattr("rose.agent.host.build", lambda env: Fickle())
    rollout = lake(lambda turn: f"word {turn}", group=4)
    group = rollout.run()
    assert {f.id for f in rollout.failed} == {"g0.1", "g0.2"}, "those that had to repeat its steps"
    for failure in rollout.failed:
        assert "Fickle is not determined by its seed and its actions" in failure.error
        assert "walked" in failure.error and "rollout/branch" in failure.error
    assert all(t.inherited in ([], [("g0.2", 3)]) for t in group) and len(group) == 4


def test_what_an_environment_has_saved_is_what_the_other_goes_on_from(lake, monkeypatch):
    monkeypatch.setattr("rose.agent.host.build", lambda env: Saved())
    rollout = lake(lambda turn: f"word {turn}", group=4)
    group = rollout.run()
    assert rollout.failed == [] and [t.turns for t in group] == [6] * 4
    assert [t.inherited for t in group] == leaves(0)
    first, *others = (rollout.chat.decode(p.unpack_tokens(t.tokens).tolist()) for t in group)
    number = first.partition(" walked")[0].split()[-1]
    assert all(text.count(f"{number} walked") == 5 for text in (first, *others)), "one state"


@pytest.mark.parametrize("environment", [FrozenLake, Saved])
async def test_a_branch_goes_on_when_its_host_is_gone(lake, monkeypatch, tmp_path, environment):
    if environment is Saved:
        monkeypatch.setattr("rose.agent.host.build", lambda env: Saved())
    rollout = lake(group=4)

    def host():
        taken = Snapshots(tmp_path, 1, rollout.config, lambda snapshot: None)
        return Hosted(rollout.config, rollout.chat, taken)

    size = rollout.config.rollout.group_size
    starts = rollout.groups.open("g0", p.Phase.TRAIN, rollout.task, size)
    [branch] = [start for start in starts if start.id == "g0.2"]
    assert (branch.follows, branch.fork) == ("g0.0", 2)
    first = host()
    for start in (starts[0], branch):
        first.handle(start)
    while (asked := await first.next(p.TurnRequest)).trajectory != branch.id:
        first.handle(rollout._made(asked))
    # what it forked off is all that there is of it
    for path in (tmp_path / branch.id).iterdir():
        assert path.name == "a001-t0002"
    for task in (left := list(first.host._trajectories.values())):
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    again, *_, last = await host().play(branch, rollout._made)
    assert (again.turn, again.tokens) == ("g0.2.t2", asked.tokens)
    assert [tuple(each) for each in last.trajectory.inherited] == [("g0.0", 2)]


@pytest.mark.slow
def test_sandboxes_fork_by_repeating_determined_commands(make_config, chats, tokenizer):
    config = make_config(
        *TREE,
        "env=terminal env.max_turns=4 env.max_new_tokens=200 env.step_timeout_s=60",
        "rollout.group_size=4 trainer.batch_size=4 model.max_context=2048",
    )

    def works(turn):
        counts = "n=$((n + 1)); echo $n >> /app/log; cat /app/log"
        early = int(turn.rpartition(".t")[2]) < 3
        return call("bash", command=counts if early else "wc -l /app/log")

    rollout = Rollout(config, chats["tiny"], tokenizer, works, domain="terminal")
    group = rollout.run()
    assert rollout.failed == [] and [sum(n for _, n in t.inherited) for t in group] == [0, 3, 2, 3]
    for t in group:
        text = rollout.chat.decode(p.unpack_tokens(t.tokens).tolist())
        assert "1\n2\n3" in text, "files and variables of before the fork"

    given = (config, chats["tiny"], tokenizer, lambda turn: call("bash", command="date +%N"))
    fickle = Rollout(*given, domain="terminal")
    fickle.run()
    assert fickle.failed
    assert all("Terminal is not determined by its seed" in f.error for f in fickle.failed)
