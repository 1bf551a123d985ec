"""The unmodified clients of OpenAI and Anthropic, each API streamed and not, and the token route."""

import asyncio
import json

import aiohttp
import anthropic
import openai
import pytest

from rose.parts.adapters.gateway import server, session
from rose.protocol import pack_tokens, unpack_tokens

from .conftest import CALL, TOOL, USER, openai_client

pytestmark = pytest.mark.slow  # the clients' imports take 3 s
SCHEMA = TOOL["function"]["parameters"]
ANTHROPIC_TOOL = {"name": "move", "description": "Move.", "input_schema": SCHEMA}
RESPONSES_TOOL = {"type": "function", "strict": False, **TOOL["function"]}


def anthropic_client(world, **changed):
    return anthropic.AsyncAnthropic(
        **{"base_url": world.url, "api_key": world.key, "max_retries": 0} | changed
    )


async def test_openai_chat_calls_tools_in_parallel_and_goes_on_in_one_branch(serve):
    async with serve(CALL + CALL, "done") as world, openai_client(world) as client:
        create = client.chat.completions.create
        said = (await create(model="m", messages=[USER], tools=[TOOL], temperature=None)).choices[0]
        calls = said.message.tool_calls
        assert said.finish_reason == "tool_calls" and said.message.content is None
        assert [call.function.name for call in calls] == ["move", "move"]
        assert json.loads(calls[0].function.arguments) == {"direction": "left"}
        told = {calls[0].id: "at 0", calls[1].id: "at 1"}
        results = [{"role": "tool", "tool_call_id": i, "content": told[i]} for i in told]
        history = [USER, said.message.model_dump(exclude_none=True), *results]
        last = await create(model="m", messages=history, tools=[TOOL], max_completion_tokens=40)
        assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("done", "stop")
        [branch] = world.session.history.branches()
        first, second = world.policy.results
        chat = world.chat
        expected = chat.start([USER], [TOOL]) + unpack_tokens(first.tokens).tolist()
        expected += chat.observations([("tool", "at 0"), ("tool", "at 1")])
        assert branch.tokens == pack_tokens(expected) + second.tokens
        assert sum(branch.mask) == (len(first.tokens) + len(second.tokens)) // 4
        assert last.usage.prompt_tokens == len(expected)


async def test_openai_chat_streams_what_it_would_answer(serve):
    async with serve(f"hm {CALL}") as world, openai_client(world) as client:
        asked = {"model": "m", "messages": [USER], "tools": [TOOL], "stream": True}
        asked |= {"stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        text = "".join(delta.content or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert text == "hm" and [c.function.name for c in calls] == ["move"]
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage.completion_tokens > 3


async def test_openai_responses_streamed_and_not(serve):
    async with serve(CALL, "done") as world, openai_client(world) as client:
        asked = {"model": "m", "instructions": "Play.", "tools": [RESPONSES_TOOL]}
        said = [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]
        [call] = (await client.responses.create(input=said, **asked)).output
        expected = ("function_call", "move", {"direction": "left"})
        assert (call.type, call.name, json.loads(call.arguments)) == expected
        said.append(call.model_dump(exclude_none=True))
        said.append({"type": "function_call_output", "call_id": call.call_id, "output": "ok"})
        stream = await client.responses.create(input=said, stream=True, **asked)
        events = [event async for event in stream]
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "done"
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "done"
        assert len(world.session.history.branches()) == 1


async def test_anthropic_messages_streamed_and_not(serve):
    async with serve(f"hm {CALL}{CALL}", "done") as world, anthropic_client(world) as client:
        asked = {"model": "m", "max_tokens": 50, "system": "Play.", "tools": [ANTHROPIC_TOOL]}
        first = await client.messages.create(messages=[USER], **asked)
        assert first.stop_reason == "tool_use"
        assert [b.type for b in first.content] == ["text", "tool_use", "tool_use"]
        assert first.content[1].input == {"direction": "left"}
        ids = [block.id for block in first.content[1:]]
        results = [{"type": "tool_result", "tool_use_id": each, "content": "ok"} for each in ids]
        history = [USER, {"role": "assistant", "content": first.content}]
        history += [{"role": "user", "content": [*results, {"type": "text", "text": "on"}]}]
        async with client.messages.stream(messages=history, **asked) as stream:
            text = "".join([part async for part in stream.text_stream])
            last = await stream.get_final_message()
        assert text == "done" and last.stop_reason == "end_turn"
        assert last.usage.output_tokens > 1
        assert len(world.session.history.branches()) == 1
        assert world.policy.requests[1].outcome == ""  # the user spoke last
        async with client.messages.stream(messages=[USER], **asked) as stream:
            last = await stream.get_final_message()
        assert last.content[1].input == {"direction": "left"}, "streamed, it is the same answer"


async def test_the_token_route_takes_and_gives_token_ids(serve, chats):
    async with serve("one", "two") as world, aiohttp.ClientSession() as http:
        prompt, where = chats["tiny"].start([USER], []), f"{world.url}/inference/v1/generate"
        headers = {"Authorization": f"Bearer {world.key}"}

        async def generate(tokens, status=200):
            body = {"token_ids": tokens, "sampling_params": {"max_tokens": 9, "logprobs": 1}}
            async with http.post(where, json=body, headers=headers) as response:
                assert response.status == status
                return (await response.json()).get("choices", [None])[0]

        await generate([*prompt, world.chat.vocabulary], 400)
        await generate([*prompt, 2**31 - 1], 400)
        assert world.policy.requests == []
        first = await generate(prompt)
        assert first["finish_reason"] == "stop"
        shown = first["logprobs"]["content"]
        assert [c["token_id"] for c in shown] == first["token_ids"]
        assert [c["token"] for c in shown] == [f"token_id:{t}" for t in first["token_ids"]]
        longer = prompt + first["token_ids"] + chats["tiny"].observations([("user", "more")])
        second = await generate(longer)
        [branch] = world.session.history.branches()
        assert unpack_tokens(branch.tokens).tolist() == longer + second["token_ids"]
        assert sum(branch.mask) == len(first["token_ids"] + second["token_ids"])


async def test_stop_strings_and_token_limits_end_a_turn_where_they_say(serve, tokenizer):
    async with serve("left STOP right", "left and more") as world, openai_client(world) as client:
        create = client.chat.completions.create
        first = (await create(model="m", messages=[USER], stop=["STOP", "never"])).choices[0]
        assert (first.message.content, first.finish_reason) == ("left ", "stop")
        second = (await create(model="m", messages=[USER], max_tokens=2)).choices[0]
        assert second.finish_reason == "length"
        whole, cut = world.session.history.branches()
        assert tokenizer.decode(unpack_tokens(whole.tokens)).endswith("left STOP")
        async with anthropic_client(world) as other:
            asked = {"model": "m", "max_tokens": 50, "messages": [USER]}
            third = await other.messages.create(stop_sequences=["and"], **asked)
        assert (third.stop_reason, third.stop_sequence) == ("stop_sequence", "and")


async def test_a_context_that_is_too_long_is_each_apis_own_refusal(serve):
    async with serve("x", max_context=40) as world:
        long = {"model": "m", "messages": [{"role": "user", "content": "left right " * 50}]}
        async with openai_client(world) as client:
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(**long)
            assert error.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(stream=True, **long)
        async with anthropic_client(world) as client:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await client.messages.create(max_tokens=5, **long)
            assert world.session.limit == "context" and world.policy.requests == []
            # An agent that goes on with a shorter history was not ended by the limit.
            await client.messages.create(max_tokens=5, model="m", messages=[USER])
        assert world.session.limit == ""


async def test_only_the_trajectorys_key_opens_and_late_calls_are_told_so(serve):
    async with serve("x") as world:
        asked, where = {"model": "m", "messages": [USER]}, f"{world.url}/v1/models"
        for key in ("wrong", world.key[:-1], "é"):
            headers = {"x-api-key": key.encode().decode("latin-1")}
            async with aiohttp.ClientSession() as http, http.get(where, headers=headers) as got:
                assert got.status == 401
        async with openai_client(world, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(**asked)
        async with openai_client(world) as client:
            assert [m.id async for m in client.models.list()] == ["tiny"]
            world.policy.gate.clear()
            running = asyncio.create_task(client.chat.completions.create(**asked))
            while not world.policy.requests:
                await asyncio.sleep(0.01)
            world.gateway.dismiss(world.session)
            for late in (running, client.chat.completions.create(**asked)):
                with pytest.raises(openai.APIStatusError) as error:
                    await late
                assert (error.value.status_code, error.value.code) == (410, "trajectory_ended")


async def test_calls_at_once_are_bounded(serve):
    async with serve("x", max_turns=2) as world, openai_client(world) as client:
        create = client.chat.completions.create
        world.policy.gate.clear()
        calls = [asyncio.create_task(create(model="m", messages=[USER], seed=i)) for i in range(17)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=120)
        errors = {type(call.exception()) for call in done}
        assert errors <= {openai.RateLimitError, openai.PermissionDeniedError}
        world.policy.gate.set()
        got = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(not isinstance(each, Exception) for each in got) == 2, "max_turns"
        assert world.session.limit


@pytest.mark.parametrize(
    "method, path, body, status",
    [
        ("POST", "/reward", b'{"reward": 1e400}', 400),
        ("POST", "/v1/chat/completions", b"no JSON", 400),
        ("POST", "/v1/messages", b"x" * 20_000, 413),
        ("GET", "/v1/models", b"", 200),
    ],
)
async def test_too_much_is_refused_unread(serve, monkeypatch, method, path, body, status):
    monkeypatch.setattr(server, "MAX_BODY", 10_000)
    for name, limit in {"BURST": 3, "RATE": 0.0, "MOST_REFUSED": 5}.items():
        monkeypatch.setattr(session, name, limit)
    async with serve("x") as world, aiohttp.ClientSession() as http:
        asked = {"data": body, "headers": {"x-api-key": world.key}}
        for expected in [status] * 3 + [429] * 2:
            async with http.request(method, world.url + path, **asked) as got:
                assert got.status == expected
        assert world.session.failed.done() == (status != 200), "5 refusals, or 2"


async def test_the_reward_is_posted_with_the_key(serve):
    async with serve("x") as world, aiohttp.ClientSession() as http:

        async def post(value, key):
            headers = {"x-api-key": key}
            async with http.post(f"{world.url}/reward", json=value, headers=headers) as got:
                return got.status

        assert await post({"reward": 1.0}, "wrong") == 401 and world.session.reward is None
        assert await post({"reward": "high"}, world.key) == 400
        assert await post({"reward": float("inf")}, world.key) == 400
        assert await post({"reward": 0.5, "success": True}, world.key) == 200
        assert world.session.reward == (0.5, True)
