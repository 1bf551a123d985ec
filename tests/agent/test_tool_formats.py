"""Each form of tool calls is read back from the chat template that writes it, token by token."""

import functools
import json

import pytest
from transformers import AutoTokenizer

from rose import checks
from rose.agent.chat import ChatFormat
from rose.agent.envs.base import ToolCall
from rose.agent.tool_calls import BadCall
from rose.config import ConfigError
from tests.made import tool

from . import served
from .conftest import TEMPLATES

# As Llama 3.2's small models and vLLM's tool_chat_template_llama3.2_pythonic.jinja write it.
PYTHONIC = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools %}{{- tools | tojson }}{% endif %}
{%- if message.tool_calls %}{{- '[' }}
{%- for call in message.tool_calls %}{{- call.function.name + '(' }}
{%- for name, value in call.function.arguments | items %}
{{- name + '=' + (value | tojson) }}{% if not loop.last %}{{- ', ' }}{% endif %}
{%- endfor %}{{- ')' }}{% if not loop.last %}{{- ', ' }}{% endif %}{% endfor %}{{- ']' }}
{%- elif message.role == 'tool' %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
# form -> (template, whether it writes several calls)
FAMILIES = {
    "hermes": (TEMPLATES["qwen3"], True),
    "qwen3_coder": (served.QWEN3_CODER, True),
    # Llama 3.1's refuses them; the model may still write them, with semicolons
    "llama3_json": (served.LLAMA3, False),
    "mistral": (served.MISTRAL, True),
    "pythonic": (PYTHONIC, True),
}
forms = pytest.mark.parametrize("form", FAMILIES)
TOOLS = [tool("move", direction="string", steps="integer")]
CALLS = (
    ToolCall("move", {"direction": "left and up", "steps": 2}),
    ToolCall("move", {"direction": "down", "steps": 1}),
)
USER = {"role": "user", "content": "F F\nP G"}
NO_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def of_family(tokenizer, tmp_path_factory):
    """of_family(form) -> (tokenizer, folder)."""

    @functools.cache
    def make(form):
        folder, thoughts = tmp_path_factory.mktemp(form) / "model", ["<think>", "</think>"]
        served.save(tokenizer, FAMILIES[form][0], folder, more=thoughts)
        return AutoTokenizer.from_pretrained(folder), folder

    return make


def said(calls):
    written = [{"id": f"rose{i:05d}", "type": "function"} for i in range(len(calls))]
    for each, call in zip(written, calls, strict=True):
        each["function"] = {"name": call.name, "arguments": call.arguments}
    return {"role": "assistant", "content": "", "tool_calls": written}


def result(index, text):
    return {"role": "tool", "content": text, "tool_call_id": f"rose{index:05d}"}


def render(tokenizer, messages, prompt=True):
    return tokenizer.apply_chat_template(
        messages, tools=TOOLS, tokenize=False, add_generation_prompt=prompt
    )


def turn_of(tokenizer, calls):
    """The tokens of a turn that makes these calls: what the template writes behind its prompt."""
    before = render(tokenizer, [USER])
    written = render(tokenizer, [USER, said(calls)], prompt=False).removeprefix(before)
    end = tokenizer.eos_token
    text = written[: written.index(end) + len(end)].removeprefix(NO_THOUGHT)
    return tokenizer.encode(text, add_special_tokens=False)


@forms
def test_the_form_is_told_by_the_template_and_calls_come_back_as_they_were_written(of_family, form):
    tokenizer, folder = of_family(form)
    chat = ChatFormat(folder)
    assert chat.format.name == form and chat.native_tools
    calls = CALLS if FAMILIES[form][1] else CALLS[:1]
    text = chat.decode(turn_of(tokenizer, calls))
    action = chat.parse(text, TOOLS)
    assert action.calls == calls and action.call == CALLS[0]
    assert chat.parse("I go on.", TOOLS).calls == ()
    broken = chat.parse(text[: text.index("left") + 2], TOOLS)
    assert isinstance(broken, BadCall) and broken.message.startswith("Bad tool call")


@forms
def test_calls_of_one_turn_are_answered_together_as_the_template_writes_it(of_family, form):
    tokenizer, folder = of_family(form)
    chat = ChatFormat(folder, tool_format=form)
    calls = CALLS if FAMILIES[form][1] else CALLS[:1]
    texts = ['a "b"\nc', "é 漢"][: len(calls)]
    turn = turn_of(tokenizer, calls)
    joined = chat.start([USER], TOOLS) + turn + chat.observations([("tool", t) for t in texts])
    history = [USER, said(calls), *(result(i, text) for i, text in enumerate(texts))]
    rendered = render(tokenizer, history)  # which may have an empty thought before the calls
    assert tokenizer.decode(joined) in (rendered, rendered.replace(NO_THOUGHT, ""))


def test_llamas_calls_parted_by_semicolons_are_several(of_family):
    chat = ChatFormat(of_family("llama3_json")[1])
    written = [json.dumps({"name": c.name, "parameters": c.arguments}) for c in CALLS]
    assert chat.parse(f"<|python_tag|>{'; '.join(written)}", TOOLS).calls == CALLS


@pytest.mark.parametrize(
    "family, key, form, words",
    [
        ("mistral", "tool_format", "nonsense", "there are auto.*hermes"),
        ("mistral", "tool_format", "qwen3_coder", "writes a call as"),
        ("smollm2", "tool_format", "mistral", "writes no tool calls"),
        ("mistral", "reasoning_format", "nonsense", "there are auto"),
    ],
)
def test_a_form_that_is_not_the_templates_is_refused(of_family, chats, family, key, form, words):
    folder = chats[family].folder if family in chats else of_family(family)[1]
    with pytest.raises(ConfigError, match=f"model.{key}='{form}'.*{words}"):
        ChatFormat(folder, **{key: form})


def test_an_unknown_form_is_refused_before_a_run_starts(tree, tmp_path):
    with pytest.raises(ConfigError, match="model.tool_format='nonsense'"):
        checks.check(tree("model.tool_format=nonsense", f"output_dir={tmp_path}"))


def test_thoughts_are_read_by_vllms_parser(of_family):
    chat = ChatFormat(of_family("hermes")[1], reasoning_format="deepseek_r1")
    call = '<tool_call>{"name": "move", "arguments": {}}</tool_call>'
    reading = chat.read(f"hm</think>\n{call}", TOOLS)
    assert reading.thought == "hm" and reading.calls == (ToolCall("move", {}),)
