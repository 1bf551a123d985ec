"""An episode whose host ends goes on from its last good snapshot, with the tokens that it had."""

import asyncio
import re

import msgspec
import pytest

from rose import protocol as p
from rose.agent.envs.base import Start
from rose.agent.loop import run_trajectory
from rose.agent.snapshots import KEPT, Snapshots, _read
from tests.agent.wander import WORDS, Wander
from tests.made import result

START = p.StartTrajectory("g1.2", "g1", p.Phase.TRAIN, "wander", 7, None)
LENGTH = 5
DEADLINE_S = 60.0


class Ends(Exception):
    """The host, in the middle of a turn."""


class Told(Snapshots):
    """`over` is set as one is on disk, or is known never to be."""

    def __init__(self, *args):
        super().__init__(*args)
        self.over = asyncio.Event()

    async def write(self, snapshot):
        await super().write(snapshot)
        self.over.set()

    def say(self, what):
        super().say(what)
        self.over.set()


class World:
    """`goes(stop)` plays the episode to its end, or until turn `stop` is asked for. The model
    thinks until a snapshot is written, or as long as `think(snapshots)`, of the turn before."""

    def __init__(self, config, chat, folder):
        self.config, self.chat, self.folder = config, chat, folder
        self.resumed, self.asked, self.version = [], [], 0

    def goes(self, stop=None, attempt=1, start=START, env=None, config=None, think=None):
        config = config or self.config
        snapshots = Told(self.folder, attempt, config, self.resumed.append)
        self.env, played = env or Wander(LENGTH), []
        think = think or (lambda snapshots: snapshots.over.wait())

        async def turn(request):
            self.asked.append(request.turn)
            if played:
                await asyncio.wait_for(think(snapshots), DEADLINE_S)
            played.append(request.turn)
            snapshots.over.clear()
            if request.turn.endswith(f"t{stop}"):
                raise Ends
            return result(request.turn, WORDS, version=self.version)

        async def play():
            env = config.env.members["wander"]
            rest = (1000, p.Sampling(16), lambda: 1.0, None, snapshots)
            return await run_trajectory(start, self.env, self.chat, turn, env, "env", *rest)

        if stop is None:
            return asyncio.run(play())
        with pytest.raises(Ends):
            asyncio.run(play())
        return None

    def files(self):
        return sorted((self.folder / START.id).iterdir())

    def resumes(self, **given):
        """The turns of the snapshots from which it went on so far, to its end, which is one walk."""
        assert is_one_walk(self, self.goes(**given))
        return [snapshot.turns for snapshot in self.resumed]


@pytest.fixture
def config(make_config):
    return make_config("env.name=wander", "env.args={}", "env.max_turns=8")


@pytest.fixture
def world(config, chats, tmp_path):
    return World(config, chats["tiny"], tmp_path)


def is_one_walk(world, trajectory):
    """It has all steps, and each begins where the one before has ended."""
    said = world.chat.decode(p.unpack_tokens(trajectory.tokens)).replace(" ", "")
    walk = re.findall(r"([0-9a-f]{8})to([0-9a-f]{8})", said)
    assert trajectory.turns == LENGTH and len(walk) == LENGTH - 1
    begins = [before for before, _ in walk]
    ends = [re.search("at([0-9a-f]{8})", said)[1], *(after for _, after in walk)]
    return begins == ends[:-1]


def test_it_goes_on_before_the_turn_that_was_asked_for(world):
    world.goes(stop=3)
    assert [path.name for path in world.files()] == ["a001-t0002", "a001-t0003"] and KEPT == 2
    world.asked.clear()
    made = world.goes()
    assert world.asked == ["g1.2.t3", "g1.2.t4"] and is_one_walk(world, made)
    [snapshot] = world.resumed
    assert snapshot.turns == 3 and made.tokens.startswith(snapshot.state.tokens)
    assert [tuple(each) for each in made.turn_tokens] == [(t, len(WORDS)) for t in range(LENGTH)]
    assert len(made.tokens) == len(made.versions) == len(made.logprobs) == 4 * len(made.mask)
    assert made.response_tokens == sum(made.mask) == LENGTH * len(WORDS)
    assert sum(made.turn_rewards or [made.reward]) == made.reward


@pytest.mark.parametrize("has_system", [True, False])
def test_it_goes_on_with_a_system_message_as_before(world, monkeypatch, has_system):
    """Templates may write another text behind a turn where there is one."""

    class Briefed(Wander):
        async def reset(self, seed):
            brief = [{"role": "system", "content": "be brief"}] * has_system
            return Start(brief + (await super().reset(seed)).messages)

    seen, observations = [], type(world.chat).observations
    spied = lambda chat, *given: seen.append(given[-1]) or observations(chat, *given)  # noqa: E731
    monkeypatch.setattr(type(world.chat), "observations", spied)
    world.goes(stop=2, env=Briefed(LENGTH))
    world.goes(env=Briefed(LENGTH))
    assert len(world.resumed) == 1 and seen == [has_system] * (LENGTH - 1)


def test_the_newest_that_other_hosts_can_resume_stays_however_slowly_states_get_there(world):
    class Slow(Wander):
        async def settled(self):
            if self.steps > 2:
                await asyncio.sleep(600)
            return True

    world.goes(stop=4, env=Slow(LENGTH))
    assert [path.name for path in world.files()] == [f"a001-t000{n}" for n in (2, 3, 4)]
    for path in world.files()[1:]:
        path.write_bytes(b"of a state that is lost")
    assert world.resumes() == [2]


def test_however_often_it_ends(world):
    for stop in (1, 1, 2, 4, 4):
        world.goes(stop)
    assert world.resumes() == [1, 1, 2, 4, 4]


def test_of_a_damaged_one_any_byte_is_noticed_and_the_one_before_is_taken(world, capsys):
    world.goes(stop=3)
    newest = world.files()[-1]
    whole = newest.read_bytes()
    wrong = [whole[:i] + bytes([b ^ 1]) + whole[i + 1 :] for i, b in enumerate(whole) if i % 7 == 0]
    for content in (*wrong, b"", whole[:10], whole[:-1]):
        newest.write_bytes(content)
        with pytest.raises(ValueError, match="its hash does not match its content"):
            _read(newest)
    assert world.resumes() == [2]
    assert "a001-t0003 is damaged (its hash does not match its content)" in capsys.readouterr().out
    for path in world.files():
        path.write_bytes(b"nonsense")
    assert is_one_walk(world, world.goes()) and len(world.resumed) == 1, "from the prompt"


def test_one_that_the_environment_cant_resume_is_passed_over(world, capsys):
    class Forgets(Wander):
        async def resume(self, saved):
            if b"3" in saved[:3]:
                raise RuntimeError("the store has lost it")
            await super().resume(saved)

    world.goes(stop=3)
    assert world.resumes(env=Forgets(LENGTH)) == [2]
    assert "turn 3 can't be resumed" in capsys.readouterr().out


def test_another_configuration_or_another_trajectory_takes_none(world, make_config):
    world.goes(stop=2)
    other = make_config("env.name=wander", "env.args={length: 5}", "env.max_turns=8")
    world.goes(config=other)
    world.goes(start=msgspec.structs.replace(START, env_seed=8))
    assert world.resumed == []


@pytest.mark.parametrize(
    "oldest, newest, taken", [(0, -1, 0), (3, 3, 1), (2, 5, 1), (4, 5, 0), (1, 2, 0)]
)
def test_another_attempt_takes_those_of_weights_that_it_allows(world, oldest, newest, taken):
    world.version = 3
    world.goes(stop=2)
    start = msgspec.structs.replace(START, oldest_version=oldest, newest_version=newest)
    world.goes(attempt=2, start=start)
    assert len(world.resumed) == taken
    # what this attempt has made is its own
    world.resumed.clear()
    world.goes(attempt=2, start=start)
    assert [snapshot.attempt for snapshot in world.resumed] == [2]


class Full(Wander):
    async def checkpoint(self):
        raise OSError("no space left")


class Large(Wander):
    async def reset(self, seed):
        return Start((await super().reset(seed)).messages, task={"answer": 10**30})


@pytest.mark.parametrize(
    "kind, words",
    [
        (Full, "Full.checkpoint raised OSError('no space left')"),
        (Large, "a snapshot could not be written: OverflowError"),  # which no file can hold
        (Wander, "a snapshot could not be written"),  # The test closes its folder to new files.
    ],
)
def test_what_can_not_be_saved_costs_snapshots_only(world, capsys, kind, words):
    if kind is Wander:
        (world.folder / START.id).write_text("in the way")
    assert is_one_walk(world, world.goes(env=kind(LENGTH)))
    assert not (world.folder / START.id).is_dir() or not world.files()
    assert words in capsys.readouterr().out


def test_a_step_waits_for_the_checkpoint_of_the_state_before_it(world):
    class Slow(Wander):
        """Its checkpoint is still under way when the model has answered."""

        begun, answered, asked = asyncio.Event(), asyncio.Event(), 0

        async def checkpoint(self):
            before = self.asked
            self.begun.set()
            await self.answered.wait()
            self.answered.clear()
            for _ in range(20):  # a step that doesn't wait would begin
                await asyncio.sleep(0)
            assert self.asked == before
            return await super().checkpoint()

        async def step(self, action):
            self.asked += 1
            if self.asked > 1:  # else the next snapshot is left out, as this one is still written
                await asyncio.wait_for(self.written.wait(), DEADLINE_S)
            return await super().step(action)

    async def until_begun(snapshots):
        slow.written = snapshots.over
        await slow.begun.wait()
        slow.begun.clear()
        slow.answered.set()

    slow = Slow(LENGTH)
    world.goes(stop=4, env=slow, think=until_begun)
    assert [_read(path).turns for path in world.files()] == [2, 3]
    assert world.resumes() == [3]
