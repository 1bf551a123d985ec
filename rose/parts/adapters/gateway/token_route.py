"""vLLM's token route: POST /inference/v1/generate takes and returns token ids.

It serves training clients that render messages by themselves. Not supported: images, text output.
"""

from __future__ import annotations

import json
import time
from typing import Any

from rose.parts.adapters.gateway import fields
from rose.parts.adapters.gateway.fields import bad, take
from rose.parts.adapters.gateway.openai_chat import DONE, refuse
from rose.parts.adapters.gateway.session import Answer, Query

__all__ = ["read", "refuse", "stream", "write"]
FIELDS = {
    "model": "returned in the answer; every name is the policy's",
    "token_ids": fields.USED,
    "sampling_params": "`max_tokens` and `stop` are used; `n` must be 1; constraints of the "
    "output are refused; everything else is the run's own",
    "stream": "used: the turn comes in one piece when it is complete",
    "output_mode": "only `tokens`",
    "request_id": fields.IGNORED,
    "stream_options": fields.IGNORED,
    "features": fields.REFUSED,
}


def read(body: dict[str, Any]) -> Query:
    """Read the body of a generate request. Raises `ApiError`."""
    tokens = take(body, "token_ids", list)
    if not tokens or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise bad("token_ids: a list of token ids is needed, at least one")
    fields.refuse(body, FIELDS)
    if (mode := take(body, "output_mode", str, "tokens")) != "tokens":
        raise bad(f"output_mode: {mode[:80]!r}; only tokens is supported")
    sampling = take(body, "sampling_params", dict, {})
    fields.refuse(sampling, fields.CONSTRAINTS)
    if take(sampling, "n", int, 1) != 1:
        raise bad(f"sampling_params.n: {sampling['n']}; only 1 is supported")
    return Query(
        max_tokens=fields.count(sampling, "max_tokens"),
        stop=fields.stops(sampling, "stop"),
        others=fields.rest(body, FIELDS) | {"sampling_params": sampling},
        tokens=tuple(tokens),
    )


def write(answer: Answer, model: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the response."""
    made = len(answer.tokens)
    usage = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": answer.prompt_tokens + made,
    }
    head = {"request_id": answer.id, "model": model, "created": int(time.time())}
    return head | {"output_mode": "tokens", "choices": [_choice(answer)], "usage": usage}


def stream(answer: Answer, model: str, body: dict[str, Any]) -> list[bytes]:
    """Return the events of a streamed response."""
    return [f"data: {json.dumps(write(answer, model, body))}\n\n".encode(), DONE]


def _choice(answer: Answer) -> dict[str, Any]:
    content = [
        {
            "token_id": token,
            "token": f"token_id:{token}",  # the form of earlier vLLMs, which some clients require
            "logprob": logprob,
            "rank": None,
            "top_logprobs": [],
        }
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)
    ]
    return {
        "index": 0,
        "finish_reason": "length" if answer.finish == "length" else "stop",
        "stop_reason": answer.stopped_by,
        "token_ids": answer.tokens,
        "logprobs": {"content": content},
    }
