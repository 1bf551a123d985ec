"""One trajectory at a time, with turns from a script: what is recorded, and what goes wrong how."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.agent.envs.base import Start, Step
from rose.agent.guard import EnvironmentFailure
from rose.agent.loop import REMINDER, run_trajectory, turn_seed
from rose.agent.tool_calls import FORM
from rose.protocol import FinishReason, Phase, Sampling, pack_tokens, unpack_floats, unpack_tokens
from tests.agent.scripted import START, Script, limits
from tests.made import result as turn_result

STEP = '<tool_call>{"name": "step", "arguments": {}}</tool_call>'
FLY = STEP.replace("step", "fly")
NONSENSE = "<tool_call>step</tool_call>"


class Walk:
    """Done after `length` calls of step; each pays 0.5, the last is a success."""

    requires_tool = True

    def __init__(self, length=2):
        self.length, self.seed, self.actions, self.closed = length, None, [], 0

    async def reset(self, seed):
        self.seed = seed
        return Start(messages=[{"role": "user", "content": "walk"}])

    async def step(self, action):
        self.actions.append(action)
        if action.call is not None and action.call.name != "step":
            return Step(observation=f"no tool {action.call.name}", invalid=True)
        self.length -= 1
        done = self.length == 0
        return Step(observation=f"{self.length} to go", reward=0.5, done=done, success=done)

    async def close(self):
        self.closed += 1


class Talk(Walk):
    """Any text is a step."""

    requires_tool = False


@pytest.fixture
def run(chats):
    """run(env, script, ...) -> the trajectory, under limits that a test may tighten."""

    async def go(env, source, max_context=1000, **changed):
        within = limits(**{"max_turns": 5, "step_timeout_s": 5.0} | changed)
        ticks = iter([100.0, 103.0])
        sampling = Sampling(max_new_tokens=1, temperature=0.7, top_p=0.9, top_k=5)
        rest = (within, "env", max_context, sampling, lambda: next(ticks))
        return await run_trajectory(START, env, chats["tiny"], source, *rest)

    return lambda *args, **kwargs: asyncio.run(go(*args, **kwargs))


def test_experts_are_asked_for_from_where_they_are_known(run, tokenizer):
    """As an engine does, each turn tells of all tokens behind those known but its own last."""

    class Routed(Script):
        async def __call__(self, request):
            result = await super().__call__(request)
            known = (len(request.tokens) + len(result.tokens)) // 4 - 1
            experts = bytes(range(request.routed, known))
            return msgspec.structs.replace(result, experts=experts, routed=len(experts))

    source = Routed(tokenizer, STEP)
    t = run(Walk(3), source)
    assert t.experts == bytes(range(len(t.mask) - 1))
    assert source.requests[0].routed == 0 < source.requests[1].routed


def columns(trajectory):
    return SimpleNamespace(
        tokens=unpack_tokens(trajectory.tokens).tolist(),
        mask=list(trajectory.mask),
        logprobs=unpack_floats(trajectory.logprobs).tolist(),
        versions=unpack_tokens(trajectory.versions).tolist(),
    )


def test_tokens_mask_logprobs_and_versions_stand_side_by_side(run, chats, tokenizer):
    chat, env, script = chats["tiny"], Walk(2), Script(tokenizer, STEP, f"now {STEP}")
    trajectory = run(env, script)

    prompt = chat.start([{"role": "user", "content": "walk"}], [])
    between = chat.observations([("tool", "1 to go")])
    first, second = (unpack_tokens(result.tokens).tolist() for result in script.results)
    got = columns(trajectory)
    assert got.tokens == prompt + first + between + second

    expected = []
    for version, (shown, said) in enumerate(((prompt, first), (between, second))):
        expected += [(0, 0.0, -1)] * len(shown)
        expected += [(1, -0.25 * (i + 1), version + (i > 1)) for i in range(len(said))]
    assert list(zip(got.mask, got.logprobs, got.versions, strict=True)) == expected
    assert (trajectory.reward, trajectory.success, trajectory.truncated) == (1.0, True, False)
    assert (trajectory.turns, trajectory.response_tokens) == (2, len(first) + len(second))
    assert (trajectory.id, trajectory.group, trajectory.phase) == ("g1.2", "g1", Phase.TRAIN)
    assert trajectory.domain == "hike"
    assert (trajectory.started, trajectory.finished) == (100.0, 103.0)
    assert (trajectory.invalid_calls, trajectory.stats) == (0, {"migrations": 2.0})
    assert (env.seed, env.closed) == (7, 1)


def test_a_turn_is_asked_for_with_the_whole_context_and_its_own_seed(run, tokenizer):
    script = Script(tokenizer, STEP)
    trajectory = run(Walk(3), script, max_new_tokens=40)
    everything = unpack_tokens(trajectory.tokens).tolist()
    for k, (request, result) in enumerate(zip(script.requests, script.results, strict=True)):
        context = unpack_tokens(request.tokens).tolist()
        assert (request.turn, request.trajectory, request.group) == (f"g1.2.t{k}", "g1.2", "g1")
        context += unpack_tokens(result.tokens).tolist()
        assert everything[: len(context)] == context
        assert request.sampling == Sampling(
            max_new_tokens=40, temperature=0.7, top_p=0.9, top_k=5, seed=turn_seed(11, f"g1.2.t{k}")
        )
    assert len({request.sampling.seed for request in script.requests}) == 3
    assert turn_seed(11, "g1.2.t0") == 212443776, "on every machine"
    assert all(0 <= turn_seed(i, "g0.0.t0") < 2**31 for i in range(200))


def test_a_turn_cut_by_its_limit_is_closed_for_it(run, chats, tokenizer):
    chat, script = chats["tiny"], Script(tokenizer, STEP, closed=False)
    got = columns(run(Walk(2), script))
    prompt = chat.start([{"role": "user", "content": "walk"}], [])
    said = unpack_tokens(script.results[0].tokens).tolist()
    end, closed = len(prompt) + len(said), [tokenizer.eos_token_id]
    assert got.tokens == prompt + said + closed + chat.observations([("tool", "1 to go")]) + said
    assert (got.mask[end], got.logprobs[end], got.versions[end]) == (0, 0.0, -1)


def rewarding_turns(env):
    env.rewards_turns = True
    return env


def test_each_turns_tokens_and_rewards_are_kept_where_the_environment_rewards_turns(run, tokenizer):
    """Two calls in the first turn, none that can be read in the second; engines died in each."""
    script = Script(tokenizer, STEP + STEP, NONSENSE, STEP)
    plain = run(Walk(3), script)
    made = [len(result.tokens) // 4 for result in script.results]
    assert plain.turn_tokens == list(enumerate(made)) and plain.turn_rewards == []
    again = run(rewarding_turns(Walk(3)), Script(tokenizer, STEP + STEP, NONSENSE, STEP))
    assert again.stats["migrations"] == 3.0
    assert again.turn_rewards == [1.0, 0.0, 0.5]
    assert again.reward == sum(again.turn_rewards) == plain.reward
    assert again.tokens == plain.tokens and again.turn_tokens == plain.turn_tokens


def behind(chats, script, text):
    """Return the text behind this answer in the second turn's context."""
    context = chats["tiny"].decode(unpack_tokens(script.requests[1].tokens).tolist())
    return context.rpartition(f"{text}<|im_end|>\n")[2]


@pytest.mark.parametrize(
    "text, answer, role, reaches_env",
    [
        (NONSENSE, "Bad tool call", "tool", False),
        ("hello", REMINDER.format(FORM), "user", False),
        (FLY, "no tool fly", "tool", True),
    ],
)
def test_an_unusable_call_is_answered(run, chats, tokenizer, text, answer, role, reaches_env):
    env, script = Walk(1), Script(tokenizer, text, STEP)
    trajectory = run(env, script)
    assert (trajectory.invalid_calls, trajectory.turns, trajectory.success) == (1, 2, True)
    assert len(env.actions) == 1 + reaches_env
    said = behind(chats, script, text)
    assert answer in said
    assert ("<tool_response>" in said) == (role == "tool")


def test_several_calls_are_carried_out_in_order_and_answered_together(run, chats, tokenizer):
    env, script = Walk(4), Script(tokenizer, STEP + STEP)
    trajectory = run(env, script)
    assert (trajectory.turns, trajectory.reward, trajectory.success) == (2, 2.0, True)
    assert [len(action.calls) for action in env.actions] == [1] * 4
    said = behind(chats, script, STEP)
    assert said.index("3 to go") < said.index("2 to go") and said.count("<tool_response>") == 2

    env = Walk(1)  # Nothing is carried out after the call that ends the task.
    assert run(env, Script(tokenizer, STEP * 3)).reward == 0.5
    assert len(env.actions) == 1


class Choir(Walk):
    several_calls = True

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    async def step(self, action):
        self.actions.append(action)
        return Step("", reward=1.0, done=len(self.actions) == 2, observations=self.answers)


def test_an_environment_may_take_all_calls_at_once(run, chats, tokenizer):
    env, script = Choir(("la", "lo")), Script(tokenizer, STEP + STEP)
    assert run(env, script).reward == 2.0
    assert [len(action.calls) for action in env.actions] == [2, 2]
    said = behind(chats, script, STEP)
    assert said.index("la\n</tool_response>") < said.index("lo\n</tool_response>")
    with pytest.raises(EnvironmentFailure, match="got 2 calls and gave 1 observations"):
        run(Choir(("la",)), Script(tokenizer, STEP + STEP))


def test_a_turn_says_how_the_tool_call_before_it_went(run, tokenizer):
    script = Script(tokenizer, STEP, NONSENSE, "hello", FLY, STEP)
    run(Walk(2), script)
    assert [r.outcome for r in script.requests] == ["", "ok", "failed", "failed", "failed"]
    assert {r.domain for r in script.requests} == {"hike"}
    run(Talk(2), script := Script(tokenizer, "hello"))
    assert [r.outcome for r in script.requests] == ["", ""]  # no tool, no outcome


@pytest.mark.parametrize("text", [STEP * 2, NONSENSE, "hello"])
def test_where_nothing_can_be_called_a_turn_is_one_text(run, tokenizer, text):
    env = Talk(1)
    trajectory = run(env, Script(tokenizer, text))
    assert [(action.text, action.calls) for action in env.actions] == [(text, ())]
    assert (trajectory.reward, trajectory.turns, trajectory.invalid_calls) == (0.5, 1, 0)


FIXTURES = [HealthCheck.function_scoped_fixture]
SAID = st.text(min_size=1, max_size=20) | st.sampled_from([STEP, NONSENSE, "<|im_start|>"])


@settings(max_examples=25, deadline=None, suppress_health_check=FIXTURES)
@given(texts=st.lists(SAID, min_size=1, max_size=4))
def test_no_generated_text_breaks_a_trajectory(run, tokenizer, texts):
    trajectory = run(Walk(2), Script(tokenizer, *texts), max_new_tokens=200, max_context=2000)
    got = columns(trajectory)
    assert len(got.tokens) == len(got.mask) == len(got.logprobs) == len(got.versions)
    assert sum(got.mask) == trajectory.response_tokens
    assert [version == -1 for version in got.versions] == [made == 0 for made in got.mask]


@settings(max_examples=50, deadline=None, suppress_health_check=FIXTURES)
@given(tokens=st.lists(st.integers(0, 700), min_size=1, max_size=64))
def test_no_generated_token_breaks_a_trajectory(run, tokens):
    async def source(request):
        return turn_result(request.turn, tokens, 0.0, finish=FinishReason.LENGTH)

    assert run(Walk(2), source).response_tokens % len(tokens) == 0


def test_the_turn_limit_truncates_after_a_turn(run, tokenizer):
    trajectory = run(Walk(9), Script(tokenizer, STEP), max_turns=3)
    assert (trajectory.turns, trajectory.truncated) == (3, True)
    assert (trajectory.success, trajectory.reward) == (False, 1.5)
    assert trajectory.mask[-1] == 1, "no observation follows the last turn"
    assert trajectory.limit == "turns"
    ended = run(Walk(3), Script(tokenizer, STEP), max_turns=3)
    assert not ended.truncated and ended.limit == "", "the end came with the last turn"


class Judged(Walk):
    async def end(self):
        return Step("", reward=0.25, done=True, success=True)


def test_an_environment_may_judge_what_a_truncated_episode_has_reached(run, tokenizer):
    trajectory = run(Judged(9), Script(tokenizer, STEP), max_turns=3)
    assert (trajectory.truncated, trajectory.success, trajectory.reward) == (True, True, 1.75)
    judged = run(rewarding_turns(Judged(9)), Script(tokenizer, STEP), max_turns=3)
    assert judged.turn_rewards == [0.5, 0.5, 0.75]
    ended = run(Judged(3), Script(tokenizer, STEP), max_turns=3)
    assert ended.reward == run(Walk(3), Script(tokenizer, STEP), max_turns=3).reward


@pytest.mark.parametrize("spare, turns", [(0, 1), (1, 2)])
def test_a_turn_follows_only_where_a_token_of_it_fits(run, chats, tokenizer, spare, turns):
    chat, script = chats["tiny"], Script(tokenizer, STEP)
    used = len(chat.start([{"role": "user", "content": "walk"}], []))
    used += len(chat.observations([("tool", "8 to go")]))
    used += len(tokenizer.encode(STEP, add_special_tokens=False)) + 1
    trajectory = run(Walk(9), script, max_context=used + spare)
    assert (trajectory.turns, trajectory.truncated, trajectory.limit) == (turns, True, "context")
    assert len(trajectory.mask) <= used + spare
    assert spare == 0 or script.requests[1].sampling.max_new_tokens == spare


def test_a_prompt_that_fills_the_context_is_a_failure_naming_the_key(run, tokenizer):
    env = Walk()
    with pytest.raises(EnvironmentFailure, match="g1.2: .* model.max_context=4"):
        run(env, Script(tokenizer, STEP), max_context=4)
    assert env.closed == 1


def broken(method, behaviour):
    env = Walk()
    setattr(env, method, behaviour)
    return env


async def hangs(*_):
    await asyncio.sleep(60)


async def hangs_and_ignores_cancellation(*_):
    for _ in range(3):
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.3)


def raises_without_being_async(*_):
    raise OSError("lake is dry")


async def raises(*_):
    raises_without_being_async()


async def cancels_itself(*_):
    raise asyncio.CancelledError


@pytest.mark.parametrize("method", ["reset", "step", "close"])
@pytest.mark.parametrize(
    "behaviour, cause",
    [
        (hangs, "did not return within env.step_timeout_s=0.05 s"),
        (hangs_and_ignores_cancellation, "did not return within env.step_timeout_s=0.05 s"),
        (raises, "lake is dry"),
        (raises_without_being_async, "lake is dry"),
        (cancels_itself, "CancelledError"),
    ],
)
def test_a_broken_environment_is_closed_and_named(run, tokenizer, method, behaviour, cause):
    env = broken(method, behaviour)
    with pytest.raises(EnvironmentFailure) as failure:
        run(env, Script(tokenizer, STEP), step_timeout_s=0.05)
    assert failure.value.trajectory == "g1.2"
    assert f"Walk.{method}" in failure.value.cause and cause in failure.value.cause
    assert env.closed == (0 if method == "close" else 1)
    made = failure.value.made  # the prompt and the answer that it failed on, or after
    assert (made is None) == (method == "reset")
    assert made is None or made.turns >= 1 and made.response_tokens > 0 and made.id == "g1.2"


def test_the_first_cause_counts_when_closing_fails_too(run, tokenizer):
    env = broken("step", raises)
    env.close = hangs
    with pytest.raises(EnvironmentFailure, match="Walk.step raised") as failure:
        run(env, Script(tokenizer, STEP), step_timeout_s=0.05)
    assert "Walk.close did not return" in failure.value.__notes__[0]


@pytest.mark.parametrize("where", ["turn", "step"])
async def test_cancellation_closes_the_environment_and_passes_on(chats, tokenizer, where):
    reached = asyncio.Event()

    async def wait(*_):
        reached.set()
        await asyncio.Event().wait()

    env = Walk() if where == "turn" else broken("step", wait)
    source = wait if where == "turn" else Script(tokenizer, STEP)
    rest = (limits(step_timeout_s=30.0), "env", 1000, Sampling(max_new_tokens=1), lambda: 0.0)
    task = asyncio.create_task(run_trajectory(START, env, chats["tiny"], source, *rest))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(asyncio.all_tasks()) == 1, "nothing stays behind"
    assert env.closed == 1


@pytest.mark.parametrize(
    "change",
    [
        {"turn": "g9.9.t0"},
        {"finish": FinishReason.ABORT},
        {"logprobs": b""},
        {"versions": pack_tokens([0] * 9)},
        dict.fromkeys(("tokens", "logprobs", "versions"), b""),
        dict.fromkeys(("tokens", "logprobs", "versions"), bytes(4 * 99)),
    ],
)
def test_a_turn_that_was_not_asked_for_is_refused(run, change):
    async def source(request):
        return msgspec.structs.replace(turn_result(request.turn, [5], 0.0), **change)

    env = Walk()
    with pytest.raises(ValueError, match=r"turn g1\.2\.t0: got"):
        run(env, source)
    assert env.closed == 1


# Without a limit, the end of the turn is the last token that it may have.
CUTS = [(True, 64, False), (True, 2, True), (False, 64, True), (True, None, False)]


@pytest.mark.parametrize("closed, most, cut", CUTS)
def test_an_answer_that_a_token_limit_ends_is_truncated(run, tokenizer, closed, most, cut):
    env, text = Talk(1), "one two three four"
    most = most or len(tokenizer.encode(text, add_special_tokens=False)) + 1
    got = run(env, Script(tokenizer, text, closed=closed), max_new_tokens=most)
    assert (got.truncated, env.actions[0].truncated) == (cut, cut)
    assert got.limit == ("answer" if cut else "")


def test_a_turn_that_was_cut_and_went_on_does_not_truncate(run, tokenizer):
    class Longer(Script):
        async def __call__(self, request):
            self.closed = bool(self.requests)
            return await super().__call__(request)

    assert not run(Walk(length=2), Longer(tokenizer, STEP)).truncated
    assert run(Walk(length=2), Script(tokenizer, STEP, closed=False)).truncated
