"""Every field of a request is used, refused in the API's own form, or named as without effect."""

import gzip
import json
import time
import zlib

import aiohttp
import pytest

from rose.agent.chat import ChatFormat
from rose.parts.adapters.gateway import fields, session
from rose.parts.adapters.gateway.server import ROUTES
from rose.protocol import pack_tokens, unpack_tokens

from .conftest import CALL, TOOL, USER

CHAT, RESPONSES, MESSAGES, TOKENS = ROUTES
BARE = {"name": "move", "input_schema": TOOL["function"]["parameters"]}
# A whole request of each API.
WHOLE = {
    CHAT: {"model": "m", "messages": [USER], "tools": [TOOL]},
    RESPONSES: {"input": "go", "tools": [{"type": "function", **TOOL["function"]}]},
    MESSAGES: {"max_tokens": 64, "messages": [USER], "tools": [BARE]},
    TOKENS: {"token_ids": [5, 6, 7]},
}
ONE_CALL = {
    CHAT: {"parallel_tool_calls": False},
    RESPONSES: {"parallel_tool_calls": False},
    MESSAGES: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}
REFUSED = [
    (path, name)
    for path, api in ROUTES.items()
    for name, becomes in api.FIELDS.items()
    if becomes.startswith(fields.REFUSED)
]


async def post(world, path, body, **options):
    """(status, the answer's JSON)."""
    headers = {"Authorization": f"Bearer {world.key}", "Content-Type": "application/json"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"method": "POST", "data": data} | options
    given["headers"] = headers | options.get("headers", {})
    async with aiohttp.ClientSession() as http, http.request(url=world.url + path, **given) as got:
        return got.status, await got.json()


def message_of(path, answer) -> str:
    """The words of a refusal in the form of the API to which `path` belongs."""
    if path.startswith(MESSAGES):
        assert answer["type"] == "error"
    else:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    return answer["error"]["message"]


@pytest.mark.parametrize("path, name", REFUSED)
async def test_a_refused_field_is_named_and_its_null_is_none(serve, path, name):
    async with serve("one") as world:
        status, answer = await post(world, path, WHOLE[path] | {name: "x"})
        assert status == 400 and name in message_of(path, answer)
        status, _ = await post(world, path, WHOLE[path] | {name: None})
        assert status == 200


@pytest.mark.parametrize("path", ROUTES)
async def test_a_field_without_effect_asks_for_no_other_answer_and_a_seed_does(serve, path):
    async with serve("one") as world:
        whole = WHOLE[path]
        ignored = {n: "x" for n, b in ROUTES[path].FIELDS.items() if b == fields.IGNORED}
        for body in (whole, whole | ignored, whole | {"model": "another"}):
            assert (await post(world, path, body))[0] == 200
        assert world.session.turns == 1
        await post(world, path, whole | {"seed": 2})
        await post(world, path, whole | {"unheard_of": 2})
        assert world.session.turns == 3


UNKNOWN = [("GET", "/", 404), ("POST", "/v1/embeddings", 404), ("GET", CHAT, 405)]
UNKNOWN += [("DELETE", MESSAGES, 405), ("POST", f"{MESSAGES}/batches", 404)]
UNKNOWN += [("POST", "/v1/models", 405), ("GET", "/%00%ff", 404)]


@pytest.mark.parametrize("method, path, status", UNKNOWN)
async def test_unknown_routes_and_methods_are_refused_in_json(serve, method, path, status):
    async with serve("one") as world:
        got, answer = await post(world, path, b"", method=method)
        assert got == status and f"POST {CHAT}" in message_of(path, answer)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_an_expected_body_is_waited_for_and_other_expectations_are_refused(serve, path):
    async with serve("one") as world:
        for expected, status in (("100-continue", 200), ("200-ok", 417)):
            headers = {"Expect": expected}
            got, answer = await post(world, path, WHOLE[path], headers=headers)
            assert got == status
            assert got == 200 or "Expect: '200-ok'" in message_of(path, answer)


async def test_a_responses_answer_repeats_what_it_was_asked_with(serve):
    async with serve("one", "two") as world:
        asked = {"parallel_tool_calls": False, "instructions": "be brief", "metadata": {"a": "b"}}
        _, bare = await post(world, RESPONSES, {"input": "go", "metadata": None})
        _, whole = await post(world, RESPONSES, WHOLE[RESPONSES] | asked)
        assert {name: whole[name] for name in asked} == asked
        assert whole["tools"] == WHOLE[RESPONSES]["tools"]
        assert (bare["parallel_tool_calls"], bare["metadata"], bare["tools"]) == (True, {}, [])


async def test_a_model_of_every_name_is_the_policy(serve):
    async with serve("one") as world:
        for name in ("tiny", "org/other"):
            status, model = await post(world, f"/v1/models/{name}", b"", method="GET")
            assert status == 200 and (model["id"], model["display_name"]) == (name, name)
        _, listed = await post(world, "/v1/models", b"", method="GET")
        assert [each["id"] for each in listed["data"]] == ["tiny"]


def asks_with(content):
    return {"messages": [{"role": "user", "content": content}]}


def says(**message):
    return {"messages": [USER, {"role": "assistant", **message}]}


DEEP = {"id": "a", "type": "function", "function": {"name": "move", "arguments": "[" * 10**5}}


@pytest.mark.parametrize(
    "given, words",
    [
        ({"chat_template_kwargs": {"tools": []}}, "tools is the conversation's own"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"add_generation_prompt": False}, "add_generation_prompt: false"),
        (says(content=None, tool_calls=[DEEP]), "arguments must be a JSON object"),
        ({"n": 2}, "n: 2; only 1"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (asks_with([{"type": "image_url", "image_url": {"url": "x"}}]), "image_url"),
        (says(content="x"), "last one not an assistant"),
        ({"messages": []}, "at least one"),
    ],
)
async def test_what_can_not_be_done_is_refused(serve, given, words):
    async with serve("one") as world:
        status, answer = await post(world, CHAT, WHOLE[CHAT] | given)
        assert status == 400 and words in message_of(CHAT, answer)
        assert world.policy.requests == []


GZIP = gzip.compress


def encoded(encoding, squeeze=GZIP, status=200, words=""):
    return {"Content-Encoding": encoding}, squeeze, status, words


def charset(name, status=200):
    """A body in this character set, which is named in a refusal."""
    header = {"Content-Type": f"application/json; charset={name}"}
    written = name if status == 200 else "ascii"
    return header, lambda body: body.decode().encode(written), status, name


@pytest.mark.parametrize(
    "headers, squeeze, status, words",
    [
        encoded("gzip"),
        encoded("deflate", zlib.compress),
        encoded("", bytes),
        encoded("gzip", lambda body: GZIP(body[:9]) + GZIP(body[9:])),
        encoded("gzip", lambda body: GZIP(body) + b"junk", 400, "is not gzip"),
        encoded("identity", bytes),
        encoded("GZIP"),
        encoded("gzip", bytes, 400, "is not gzip"),
        encoded("br", bytes, 415, "'br'"),
        encoded("gzip, br", bytes, 415, "gzip, br"),
        encoded("gzip", lambda body: GZIP(body)[:-9], 400, "ends too soon"),
        encoded("gzip", lambda _: GZIP(bytes(2**25 + 1)), 413, "bytes at most"),
        encoded("gzip", lambda _: GZIP(b"[]"), 400, "a JSON object"),
        encoded("gzip", lambda body: GZIP(body) + GZIP(b"") * 15),
        encoded("gzip", lambda body: GZIP(body) + GZIP(b"") * 16, 400, "16 parts"),
        encoded("gzip", lambda _: b"", 400, "ends too soon"),
        *map(charset, ("utf-8", "UTF-16", "latin-1", "us-ascii")),
        # They would decode slowly, or not at all.
        *(charset(name, 415) for name in ("punycode", "utf-7", "rot13", "nonsense")),
    ],
)
async def test_a_body_in_an_encoding_is_read_or_refused(serve, headers, squeeze, status, words):
    async with serve("one") as world:
        data = squeeze(json.dumps(WHOLE[CHAT]).encode())
        got, answer = await post(world, CHAT, data, headers=headers)
        assert got == status, answer
        assert got == 200 or words in message_of(CHAT, answer)


async def test_tokens_are_counted_without_a_call(serve):
    async with serve("one") as world:

        async def counted(body):
            return await post(world, f"{MESSAGES}/count_tokens", body)

        body = WHOLE[MESSAGES] | {"system": "be brief"}
        status, found = await counted(body)
        assert status == 200 and world.session.turns == 0 and not world.session.called.done()
        _, answer = await post(world, MESSAGES, body)
        assert found == {"input_tokens": answer["usage"]["input_tokens"]}
        assert (await counted({"messages": [USER]}))[0] == 200, "max_tokens is not needed"
        status, answer = await counted({"messages": 5})
        assert status == 400 and "messages" in message_of(MESSAGES, answer)
        status, found = await counted(asks_with("go " * 5000))
        assert status == 200 and found["input_tokens"] > 2000, "beyond the context"
        assert not world.session.limit
        began = time.monotonic()
        status, found = await counted(asks_with("x" * 2_000_000))
        assert status == 200 and found["input_tokens"] == world.chat.least_tokens(2_000_000)
        assert time.monotonic() - began < 60, "no tokens were made of it"


@pytest.mark.parametrize("path", ONE_CALL)
async def test_without_parallel_calls_a_turn_ends_with_its_first(serve, path):
    second = CALL.replace("left", "up")
    async with serve(f"so {CALL}{second} and more", "done") as world:
        status, answer = await post(world, path, WHOLE[path] | ONE_CALL[path])
        said = {name: value for name, value in answer.items() if name != "tools"}
        assert status == 200 and json.dumps(said).count('"move"') == 1
        [branch] = world.session.history.branches()
        made = [t for t, own in zip(unpack_tokens(branch.tokens), branch.mask, strict=True) if own]
        assert world.chat.decode(made) == f"so {CALL}"


async def test_many_marks_of_unreadable_calls_are_not_each_read(serve, monkeypatch):
    """A policy may repeat itself to the end of its tokens."""
    reads, true = [], ChatFormat.read

    def read(chat, text, tools):
        reads.append(text)
        return true(chat, text, tools)

    monkeypatch.setattr(ChatFormat, "read", read)
    broken = '<tool_call>\n{"name": "move"</tool_call>'
    async with serve(broken * 40 + CALL + CALL, max_new_tokens=1900) as world:
        status, _ = await post(world, CHAT, WHOLE[CHAT] | ONE_CALL[CHAT])
        assert status == 200
    assert len(reads) <= 2 + session.MOST_MARKS


async def test_a_history_with_its_one_call_goes_on_in_the_same_branch(serve):
    async with serve(CALL + CALL.replace("left", "up"), "done") as world:
        body = WHOLE[CHAT] | ONE_CALL[CHAT]
        _, answer = await post(world, CHAT, body)
        said = answer["choices"][0]["message"]
        [call] = said["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "at 0"}
        status, _ = await post(world, CHAT, body | {"messages": [USER, said, result]})
        [branch] = world.session.history.branches()
        # as a server would render it: one call, its end, the result
        expected = world.chat.start([USER], [TOOL]) + world.chat._encode(CALL)
        expected += world.chat.observations([("tool", "at 0")], closed=False)
        assert status == 200
        assert branch.tokens == pack_tokens(expected) + (world.policy.results[1].tokens)
