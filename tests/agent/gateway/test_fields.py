"""Fields that the gateway can't serve are refused in each API's own JSON, streamed or not."""

import asyncio

import aiohttp
import pytest

from .conftest import USER

CHAT = ("/v1/chat/completions", {"messages": [USER]})
RESPONSES = ("/v1/responses", {"input": "go"})
MESSAGES = ("/v1/messages", {"messages": [USER], "max_tokens": 5})
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {}}}


def post(serve, path, body, json_type="application/json", scheme="Bearer"):
    """(status, the answer) of a call; (200, None) of a stream."""

    async def go():
        async with serve("x") as world, aiohttp.ClientSession() as http:
            headers = {"Authorization": f"{scheme} {world.key}", "Content-Type": json_type}
            async with http.post(world.url + path, json=body, headers=headers) as got:
                plain = got.content_type == "application/json"
                return got.status, await got.json() if plain else None

    return asyncio.run(go())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "route, more, name",
    [
        (CHAT, {"stream_options": 5}, "stream_options"),
        (CHAT, {"stream_options": ["include_usage"]}, "stream_options"),
        (CHAT, {"stream_options": {"include_usage": "yes"}}, "include_usage"),
        (CHAT, {"response_format": SCHEMA}, "response_format"),
        (CHAT, {"response_format": "json"}, "response_format"),
        (RESPONSES, {"text": {"format": SCHEMA}}, "text.format"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
        (RESPONSES, {"text": "json"}, "text"),
        (MESSAGES, {"output_config": {"format": SCHEMA}}, "output_config.format"),
        (MESSAGES, {"output_format": SCHEMA}, "output_format"),
    ],
)
def test_what_can_not_be_served_is_refused(serve, route, more, name, streamed):
    path, body = route
    status, answer = post(serve, path, body | more | {"stream": streamed})
    assert status == 400 and answer["error"]["message"].startswith(f"{name}: ")
    assert (path == MESSAGES[0]) == (answer.get("type") == "error")


@pytest.mark.parametrize(
    "route, more",
    [
        (CHAT, {"stream": True, "stream_options": {"include_usage": None}}),
        (CHAT, {"response_format": {"type": "text"}, "stream_options": None}),
        (RESPONSES, {"text": {"format": {"type": "text"}, "verbosity": "low"}}),
        (MESSAGES, {"output_config": {"effort": "low"}}),
    ],
)
def test_free_text_is_served(serve, route, more):
    path, body = route
    assert post(serve, path, body | more)[0] == 200


def test_an_unknown_charset_is_a_400_and_a_scheme_has_no_case(serve):
    status, answer = post(serve, *CHAT, json_type="application/json; charset=nonsense")
    assert status == 400 and answer["error"]["message"] == "the body is no JSON"
    assert post(serve, *CHAT, scheme="bearer")[0] == 200
