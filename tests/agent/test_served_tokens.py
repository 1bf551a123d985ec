"""A model is trained on the tokens that it gets when it is served: conversations made at random are
written alike by the loop, by the gateway for each API, and by `vllm serve`, or refused by both."""

import copy
import functools
import json
import random

import pytest

from rose.agent.chat import CannotExtend, ChatFormat
from rose.agent.template import takes_parts
from rose.parts.adapters.gateway import anthropic_messages, openai_chat, openai_responses
from rose.parts.adapters.gateway.history import History
from rose.parts.adapters.gateway.session import ApiError
from tests.made import result

from . import served
from .conftest import TEMPLATES, TRL_TEMPLATES

STYLES = {
    "chatml": served.CHATML,
    "hermes": {"default": served.CHATML, "tool_use": served.QWEN2_5},
    "llama3": served.LLAMA3,
    "mistral": served.MISTRAL,
    "gemma": served.GEMMA,
    "qwen3": TEMPLATES["qwen3"],
    "deepseek": served.DEEPSEEK,
    "gpt_oss": served.GPT_OSS,
    "mistral_v3": served.MISTRAL_V3,
}
REFUSES_TOOLS = {"gpt_oss", "mistral_v3"}
styles = pytest.mark.parametrize("style", STYLES)
TEXTS = ["go", "F F\nP G", " \n edges\t ", "", "0", "é 漢 🙂 Ä", "\"quoted\" <b> & 'x'\\n"]
TEXTS += ["a\u2028b", "write <tool_call> here", "{{ x }} {% if %}"]
ARGUMENTS = [*TEXTS, "ends with </tool_call>", "a </think> tag", "<|im_start|>"]
ARGUMENTS += [3, None, [1.5], {"k": ""}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "string", "description": "é <b>"}}}
FUNCTIONS = [
    {"name": "f", "description": "d", "parameters": SCHEMA},
    {"name": "g", "parameters": SCHEMA},
    {"name": "h", "description": "no parameters"},
    {"name": "i", "description": "d", "parameters": SCHEMA, "strict": True, "unknown": 1},
]


F = {"type": "function", "function": FUNCTIONS[0]}
CALL = {"id": "abcd56789", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def sides(tokenizer, tmp_path_factory):
    """sides(style or template) -> (chat format, vLLM with what an export of that model has)."""

    @functools.cache
    def of(style):
        template, folder = STYLES.get(style, style), tmp_path_factory.mktemp("style") / "model"
        chat = ChatFormat(served.save(tokenizer, template, folder))
        if not chat.native_tools:
            (folder / "chat_template.jinja").write_text(chat.template)
        return chat, served.Vllm(folder)

    return of


def conversations(style, count):
    """(messages, functions), drawn from the seeds below `count`."""
    for rng in map(random.Random, range(count)):
        tools = style not in REFUSES_TOOLS and rng.random() < 0.7
        said = conversation(rng, style, tools)
        yield said, rng.sample(FUNCTIONS, 3) if tools else []


def conversation(rng, style, tools):
    """(role, texts, calls, thought, id of the answered call) of each message; the policy's turn is
    next."""
    texts = lambda: [rng.choice(TEXTS) for _ in range(rng.choice([1, 1, 1, 2, 3]))]  # noqa: E731
    said = [("system", texts(), [], "", "")] if rng.random() < 0.6 else []
    said.append(("user", texts(), [], "", ""))
    for turn in range(rng.randrange(4)):
        thought = rng.choice(["", "", "hm\n<b>"]) if style == "qwen3" else ""
        if not tools or rng.random() < 0.3:
            said.append(("assistant", [rng.choice(["I go.", "é 漢 <b>", "0"])], [], thought, ""))
            said.append(("user", texts(), [], "", ""))
            continue
        count = 1 if style == "llama3" else rng.choice([1, 1, 2])
        names = [f"{turn:04d}{i:05d}" for i in range(count)]
        arguments = [{"b": rng.choice(ARGUMENTS), "é": 1} for _ in names]
        calls = list(zip(names, rng.choices("fghi", k=count), arguments, strict=True))
        said.append(("assistant", [rng.choice(["", "so"])], calls, thought, ""))
        said += [("tool", texts(), [], "", name) for name in names]
        if rng.random() < 0.3:
            said.append(("user", texts(), [], "", ""))
    said[-1][1].append("on")  # Anthropic's API drops a message of empty texts.
    return said


def chat_body(said, functions):
    messages = []
    for role, texts, calls, thought, name in said:
        parts = [{"type": "text", "text": text} for text in texts]
        message = {"role": role, "content": texts[0] if len(texts) == 1 else parts}
        if calls:
            made = [{"name": f, "arguments": json.dumps(a)} for _, f, a in calls]
            listed = zip(calls, made, strict=True)
            message["tool_calls"] = [CALL | {"id": c[0], "function": f} for c, f in listed]
        message |= {"reasoning_content": thought} if thought else {}
        messages.append(message | ({"tool_call_id": name} if name else {}))
    tools = [{"type": "function", "function": function} for function in functions]
    return {"model": "m", "messages": messages} | ({"tools": tools} if tools else {})


def messages_body(said, functions):
    body, messages = {"model": "m", "max_tokens": 4, "messages": []}, []
    for role, texts, calls, thought, name in said:
        blocks = [{"type": "text", "text": text} for text in texts]
        if role == "system":
            body["system"] = texts[0] if len(texts) == 1 else blocks
            continue
        if role == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": name, "content": blocks}]
        if thought:
            blocks = [{"type": "thinking", "thinking": thought, "signature": "s"}, *blocks]
        blocks += [{"type": "tool_use", "id": i, "name": f, "input": a} for i, f, a in calls]
        messages.append({"role": "user" if role == "tool" else role, "content": blocks})
    tools = []
    for function in functions:
        tool = {key: value for key, value in function.items() if key != "parameters"}
        tools.append(tool | {"input_schema": dict(function.get("parameters", {"properties": {}}))})
    return body | {"messages": messages} | ({"tools": tools} if tools else {})


def responses_body(said, functions):
    items, body = [], {"model": "m"}
    for role, texts, calls, thought, name in said:
        parts = [{"type": "input_text", "text": text} for text in texts]
        if role == "system":
            body["instructions"] = "\n".join(texts)
            continue
        if role == "tool":
            answered = {"call_id": name, "output": "\n".join(texts)}
            items.append({"type": "function_call_output", **answered})
            continue
        if thought:
            content = [{"type": "reasoning_text", "text": thought}]
            items.append({"type": "reasoning", "id": "r", "summary": [], "content": content})
        if role == "user":
            items.append({"role": role, "content": parts})
        elif texts[0] or not calls:
            items.append({"role": role, "content": texts[0]})
        for i, f, a in calls:
            call = {"call_id": i, "name": f, "arguments": json.dumps(a)}
            items.append({"type": "function_call", **call})
    tools = [{"type": "function", "strict": None, "parameters": None, **f} for f in functions]
    return body | {"input": items} | ({"tools": tools} if tools else {})


APIS = {
    "chat": (openai_chat, chat_body),
    "messages": (anthropic_messages, messages_body),
    "responses": (openai_responses, responses_body),
}


def tokens_or_none(write, *given):
    """Return None where the conversation is refused."""
    from vllm.exceptions import VLLMValidationError  # imported here, since it takes seconds

    try:
        return list(write(*given))
    except (CannotExtend, ApiError, VLLMValidationError):
        return None


def place(chat, api, body):
    """Return where the gateway sees a request in a new history."""
    query = APIS[api][0].read(copy.deepcopy(body))
    return History(chat).place(query.messages, query.tools, query.template_args)


def shown(chat, tokens):
    return None if tokens is None else chat._backend.decode(tokens, skip_special_tokens=False)


@styles
@pytest.mark.parametrize("api", APIS)
def test_the_gateway_writes_a_request_as_vllm_does(sides, style, api):
    chat, vllm = sides(style)
    written = 0
    for said, functions in conversations(style, 24):
        body = APIS[api][1](said, functions)
        theirs = tokens_or_none(getattr(vllm, api), body)
        ours = tokens_or_none(lambda body: place(chat, api, body).new, body)
        assert shown(chat, ours) == shown(chat, theirs), body
        assert ours == theirs
        written += theirs is not None
    assert written > 12, "most conversations are such that the template writes them"


SYSTEM, GO, YES = (
    {"role": role, "content": content}
    for role, content in (("system", "be brief"), ("user", "go"), ("assistant", "yes"))
)
READ = openai_chat.read({"messages": [GO, YES, GO]}).messages
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    "api, asked, thinks",
    [
        ("chat", OFF, False),
        ("chat", {"reasoning_effort": "none"}, False),
        ("chat", {"reasoning_effort": "high"}, True),
        ("chat", {"reasoning_effort": "high"} | OFF, False),
        ("chat", {"chat_template_kwargs": {"nobody_reads_this": 1, "enable_thinking": None}}, True),
        ("responses", {"reasoning": {"effort": "none", "summary": "auto"}}, False),
        ("responses", OFF, False),
        ("messages", {"thinking": {"type": "disabled"}}, False),
        ("messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, True),
        ("messages", OFF, False),
    ],
)
def test_a_requests_arguments_of_the_template_are_used_as_vllm_does(sides, api, asked, thinks):
    chat, vllm = sides("qwen3")
    for seed in range(6):
        said = conversation(random.Random(seed), "qwen3", True)
        body = APIS[api][1](said, FUNCTIONS[:2]) | asked
        theirs = getattr(vllm, api)(body)
        assert shown(chat, place(chat, api, body).new) == shown(chat, theirs)
        assert shown(chat, theirs).endswith("</think>\n\n") == (not thinks)


def gone_on(chat, *args):
    """(a history in which YES is the answer to GO, the answer's node)."""
    history = History(chat)
    first = history.place(READ[:1], [], *args)
    node = history.record(first, result("g.t0", chat._encode("yes") + [min(chat.eos_ids)]))
    history.answered(READ[:1], [], READ[1], node, *args)
    return history, node


def test_a_conversation_goes_on_only_with_the_same_arguments_of_the_template(sides):
    chat, vllm = sides("qwen3")
    off = OFF["chat_template_kwargs"]
    history, node = gone_on(chat, off)
    assert history.place(READ, [], off).parent is node
    found = history.place(READ, [], off).new[-4:]
    assert found == vllm.chat({"model": "m", "messages": [GO]} | OFF)[-4:]
    assert history.place(READ, []).parent is None


def test_an_answer_to_which_the_agent_adds_a_name_goes_on_in_its_branch(sides):
    history, node = gone_on(sides("chatml")[0])
    named = openai_chat.read({"messages": [GO, {**YES, "name": "agent_1"}, GO]})
    assert history.place(named.messages, []).parent is node


LINE = "x-anthropic-billing-header: cch=1f"


@pytest.mark.parametrize("text", [LINE, f"{LINE}\nbe brief\nor not", f"be {LINE}", f"{LINE}\n"])
@pytest.mark.parametrize("style", ["chatml", "llama3"])
def test_claude_codes_line_goes_from_the_system_message_as_vllm_drops_it(sides, style, text):
    chat, vllm = sides(style)
    parts = [{"type": "text", "text": each} for each in (text, "go on")]
    typed = [part | {"type": "input_text"} for part in parts]
    plain, listed = ({"role": "system", "content": each} for each in (text, parts))
    for api, key, given in (
        *(("chat", "messages", each) for each in (plain, listed)),
        *(("messages", "system", each) for each in (text, parts)),
        *(("messages", "messages", each) for each in (plain, listed)),
        ("responses", "instructions", text),
        *(("responses", "input", each) for each in (plain, listed | {"content": typed})),
    ):
        body = {"model": "m", "max_tokens": 4} if api == "messages" else {"model": "m"}
        body |= {"input" if api == "responses" else "messages": [GO]}
        body[key] = [given, GO] if key in ("messages", "input") else given
        ours = place(chat, api, body).new
        assert shown(chat, ours) == shown(chat, getattr(vllm, api)(body)), (api, key)


def steps(vllm, body):
    """(messages before an answer, those before the next, their texts) while vLLM writes both and
    leaves the first text as it was, as templates that drop thoughts don't."""
    listed = body["messages"]
    ends = [i for i, message in enumerate(listed) if message["role"] == "assistant"] + [len(listed)]
    for before, after in zip(ends, ends[1:], strict=False):
        texts = [
            tokens_or_none(vllm.chat, body | {"messages": listed[:n]}) for n in (before, after)
        ]
        if None in texts:
            return
        first, second = (vllm._tokenizer.decode(t) for t in texts)
        if not second.startswith(first):
            return
        yield before, after, first, second


def turn_of(chat, first, second):
    """The tokens of the answer behind `first`."""
    text = second[len(first) :]
    end = min((text.find(e), e) for e in chat._eos_texts() if e in text)
    return chat._encode(text[: end[0] + len(end[1])])


@styles
def test_the_gateway_goes_on_after_a_turn_as_vllm_does(sides, style):
    chat, vllm = sides(style)
    steps_seen = 0
    for said, functions in conversations(style, 24):
        body = chat_body(said, functions)
        query, history = openai_chat.read(copy.deepcopy(body)), History(chat)
        for before, after, first, second in steps(vllm, body):
            place = history.place(query.messages[:before], query.tools)
            node = history.record(place, result("g.t0", turn_of(chat, first, second)))
            history.answered(query.messages[:before], query.tools, query.messages[before], node)
            following = history.place(query.messages[:after], query.tools)
            assert following.parent is node
            context = list(memoryview(following.context).cast("i"))
            assert shown(chat, context) == second, body
            steps_seen += 1
    assert steps_seen > 6


@styles
def test_the_loop_goes_on_after_a_turn_as_vllm_does(sides, style):
    chat, vllm = sides(style)
    steps_seen = 0
    for said, functions in conversations(style, 36):
        said = [(r, ["\n".join(t)], c, h, name and f"rose{name[4:]}") for r, t, c, h, name in said]
        body, tokens = chat_body(said, functions), None
        listed, given = body["messages"], body.get("tools", [])
        for before, after, first, second in steps(vllm, body):
            tokens = chat.start(listed[:before], given) if tokens is None else tokens
            assert shown(chat, tokens) == first
            observed = [(m["role"], m["content"]) for m in listed[before + 1 : after]]
            gap = chat.observations(observed, True, bool(given))
            tokens = tokens + turn_of(chat, first, second) + gap
            assert shown(chat, tokens) == second, body
            steps_seen += 1
    assert steps_seen > 6


@pytest.mark.parametrize("style", sorted(REFUSES_TOOLS))
def test_a_template_whose_tools_cannot_be_appended_is_refused_with_tools(sides, style):
    chat, _ = sides(style)
    assert "can't be used with tools" in chat.tools_problem
    with pytest.raises(CannotExtend, match="can't be used with tools"):
        chat.start([GO], [F])


def test_a_system_message_that_moves_is_refused_in_a_conversation_with_one(sides):
    chat, vllm = sides(served.MISTRAL_7B)
    for messages in ([GO], [SYSTEM, GO]):
        assert chat.start(messages, []) == vllm.chat({"model": "m", "messages": messages})
    prompt = chat.start([GO], []) + chat._encode("yes") + [chat._tokenizer.eos_token_id]
    prompt += chat.observations([("user", "go")], True, False)
    assert prompt == vllm.chat({"model": "m", "messages": [GO, YES, GO]})
    with pytest.raises(CannotExtend, match="could not stay as they were"):
        chat.observations([("user", "go")], True, False, system=True)


def test_marks_that_depend_on_the_turns_before_are_refused(sides):
    """Results that a template numbers, with tools; a conversation's length, always."""
    assert "depends on the turns before" in sides(served.NUMBERED)[0].tools_problem
    with pytest.raises(CannotExtend, match="depends on the turns before"):
        sides(served.LENGTH)


@pytest.mark.parametrize("template", [served.SLICED, served.CUTS])
@pytest.mark.parametrize("content", ["a", "a</think>b", "{}"])
def test_an_id_or_a_text_is_written_as_the_template_does(sides, template, content):
    chat, vllm = sides(template)
    answer, observed, tools = YES, {"role": "user", "content": content}, {}
    if template == served.SLICED:
        answer, tools = {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"tools": [F]}
        observed = {"role": "tool", "tool_call_id": CALL["id"], "content": content}
    asked = ([GO], [GO, answer, observed])
    first, second = (vllm.chat({"model": "m", "messages": each} | tools) for each in asked)
    gap = chat.observations([observed], True, bool(tools))
    assert second[len(second) - len(gap) :] == gap and second[: len(first)] == first


@pytest.mark.parametrize("content", [None, [], "", "absent"])
@pytest.mark.parametrize("style", ["chatml", "qwen3", "gemma"])
def test_a_call_without_text_is_written_as_vllm_does(sides, style, content):
    chat, vllm = sides(style)
    answer = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    if content == "absent":
        del answer["content"]
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "r"}
    body = {"model": "m", "messages": [GO, answer, result], "tools": [F]}
    assert place(chat, "chat", body).new == vllm.chat(body)


@pytest.mark.parametrize(
    "api, block",
    [
        ("chat", {"type": "refusal", "refusal": "no"}),
        # A thought that Anthropic has encrypted.
        ("messages", {"type": "redacted_thinking", "data": "x"}),
    ],
)
def test_a_refusal_is_a_text_and_an_unreadable_thought_is_left_out(sides, api, block):
    chat, vllm = sides("chatml")
    said = [block, {"type": "text", "text": "yes"}][: 1 + (api == "messages")]
    body = {"model": "m", "max_tokens": 4}
    body["messages"] = [GO, {"role": "assistant", "content": said}, GO]
    assert place(chat, api, body).new == getattr(vllm, api)(body)


def test_developers_and_names_reach_the_template_as_in_vllm(sides):
    chat, vllm = sides("mistral")
    said = [("developer", "one"), ("system", "two"), ("user", "go"), ("developer", "three")]
    messages = [{"role": role, "content": content} for role, content in said] + [GO]
    messages[2]["name"] = "ada"
    body = {"model": "m", "messages": messages}
    assert place(chat, "chat", body).new == vllm.chat(body)
    assert openai_chat.read(body).messages[2].rendered(chat)["name"] == "ada"


def test_a_content_is_given_in_parts_where_vllm_gives_it_so():
    from vllm.renderers.hf import _detect_content_format

    found = [path for path in TRL_TEMPLATES.glob("*.jinja") if "training" not in path.name]
    texts = [path.read_text() for path in found]
    texts += [t for t in STYLES.values() if isinstance(t, str)]
    parts = "{% for part in m.content %}{{ part }}{% endfor %}"
    texts += [
        "{% for m in messages %}{% for k, v in m.content %}{% endfor %}" + parts + "{% endfor %}",
        "{% for role, group in messages | groupby('role') %}{% endfor %}"
        "{% for part in content %}{{ part }}{% endfor %}",
    ]
    theirs = {text: _detect_content_format(text, default="string") == "openai" for text in texts}
    assert {text: takes_parts(text) for text in texts} == theirs
    assert len(set(theirs.values())) == 2
