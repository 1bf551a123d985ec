"""Texts that can't fit are refused unread, and long ones are encoded beside the event loop."""

import asyncio
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from rose.agent import chat as chat_module
from rose.agent.chat import _longest_token
from rose.agent.envs.base import Start, Step
from rose.agent.guard import TaskFailure
from rose.parts.adapters.gateway.history import Call, Message
from rose.parts.adapters.gateway.session import ApiError, Query, Session
from rose.protocol import Sampling
from tests.agent.scripted import START, Script, limits

from .test_returned import ASK, Odd, play

HUGE = "x y " * 2_500_000  # 10 MB, as a log that an agent read


def forbid(chat, monkeypatch):
    """Nothing may be made tokens of."""
    monkeypatch.setattr(chat, "_backend", None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text()
    | st.text("x y\n\u0301\u0313\u0345α")
    | st.text(st.sampled_from(" \n\t")).map(lambda text: text * 40)
)
def test_the_bound_is_never_above_the_tokens_that_a_text_has(chats, text):
    for chat in chats.values():
        tokens = chat.start([{"role": "user", "content": text}], [])
        assert chat._longest > 0 and chat.least_tokens(len(text)) <= len(tokens)


def bpe(normalizer=None, **added):
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken(**added)] if added else [])
    return backend


def test_where_one_token_may_stand_for_any_number_of_characters_there_is_no_bound():
    words = Tokenizer(models.WordLevel(vocab={"[UNK]": 0}, unk_token="[UNK]"))
    unknown = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))  # drops what it doesn't know
    spaces, takes_spaces = bpe(normalizers.Replace(" ", "")), bpe(content="<|end|>", rstrip=True)
    assert [_longest_token(each) for each in (words, unknown, spaces, takes_spaces)] == [0] * 4
    assert _longest_token(bpe()) == 2 and _longest_token(bpe(normalizers.NFC())) == 8
    assert _longest_token(bpe(content="<|end|>")) == 7


def test_a_huge_observation_ends_its_trajectory_without_a_token_of_it(chats, monkeypatch):
    chat, seen = chats["tiny"], []
    monkeypatch.setattr(chat, "observations", lambda *given: seen.append(given))
    made = play(chats, Odd(step=lambda: Step(HUGE, reward=0.5)))
    assert made.truncated and made.reward == 0.5 and not seen


def test_a_huge_first_prompt_gives_its_task_up_without_a_token_of_it(chats, monkeypatch):
    chat = chats["tiny"]
    forbid(chat, monkeypatch)
    with pytest.raises(TaskFailure, match=r"has at least \d+ tokens, which leaves no room"):
        play(chats, Odd(reset=lambda: Start([ASK | {"content": HUGE}])))


def opened(chats, tokenizer, max_context):
    policy = Script(tokenizer, "one")
    return Session(START, chats["tiny"], policy, limits(), max_context, Sampling(1))


async def test_a_huge_call_is_refused_without_a_token_of_it(chats, tokenizer, monkeypatch):
    session = opened(chats, tokenizer, 500)
    forbid(chats["tiny"], monkeypatch)
    with pytest.raises(ApiError) as refused:
        await session.answer(Query((Message("user", "see:"), Message("user", HUGE))))
    error = refused.value
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "at least" in error.message and "model.max_context" in error.message
    assert session.limit and session._refused == 1


@pytest.mark.parametrize("characters, beside", [(10, False), (1000, True)])
def test_long_texts_become_tokens_in_another_thread(chats, monkeypatch, characters, beside):
    chat, threads = chats["tiny"], []
    monkeypatch.setattr(chat_module, "LOOP_CHARACTERS", 100)

    def write(text):
        threads.append(threading.current_thread())
        return [text]

    text = "x" * characters
    assert asyncio.run(chat.in_thread(len(text), write, text)) == [text]
    assert (threads != [threading.main_thread()]) is beside


def test_a_long_call_and_a_long_observation_go_that_way(chats, tokenizer, monkeypatch):
    chat, sizes = chats["tiny"], []
    in_thread = type(chat).in_thread

    async def counted(self, characters, write, *given):
        sizes.append(characters)
        return await in_thread(self, characters, write, *given)

    monkeypatch.setattr(type(chat), "in_thread", counted)
    play(chats, Odd(step=lambda: Step("well " * 20)))

    async def scene():
        session = opened(chats, tokenizer, 50_000)
        await session.answer(Query((Message("user", "up " * 10_000),)))

    asyncio.run(scene())
    assert sizes[:2] == [len(ASK["content"]) + len("[]"), 100]
    assert all(size > 30_000 for size in sizes[2:]) and len(sizes) == 4


def test_long_tools_and_calls_and_many_messages_take_time_too():
    up, long = Message("user", "up"), "x" * 10_000
    tool = {"type": "function", "function": {"name": "go", "description": long}}
    call = Message("assistant", "", (Call("c1", "go", {"text": long}),))
    done = Message("tool", "done", call_id="c1")
    for query in (Query((up,), [tool]), Query((up, call, done)), Query((up,) * 1000)):
        assert query.size > Query((up,)).size + 10_000
