"""Convert messages and tools to the form in which `vllm serve` passes them to a chat template.

A model must be trained on the tokens that it gets when vLLM serves it. So this module follows the
rules of vLLM 0.32 (vllm/renderers/chat_utils.py and hf.py), for example for contents in parts and
for tools without a description. It copies the rules instead of importing vLLM, which takes seconds
and 0.5 GiB. tests/agent/test_served_tokens.py compares both.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError, meta, nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from rose.agent.tool_calls import CLOSE, FORM, OPEN

# Prefix for a template that ignores tools. It describes the tools in the system message and turns
# calls and results into text, so the template gets only text. ROSE exports the model with it.
TOOLS_AS_TEXT = (
    r"""
{%- set rose = namespace(messages=[], text='', results='') %}
{%- set rose.parts = messages and messages[0].content is not string %}
{%- if tools %}
{%- if messages[0].role == 'system' %}
{%- set rose.text = messages[0].content %}
{%- if rose.parts %}
{%- set rose.text = rose.text | map(attribute='text') | join('\n') %}
{%- endif %}
{%- set rose.text = rose.text + '\n\n' %}
{%- set messages = messages[1:] %}
{%- endif %}
{%- set rose.text = rose.text + '# Tools\n' %}
{%- for tool in tools %}
{%- set rose.text = rose.text + (tool.function | tojson) + '\n' %}
{%- endfor %}
{%- set rose.text = rose.text + 'To call a tool, write @FORM@' %}
{%- set content = [{'type': 'text', 'text': rose.text}] if rose.parts else rose.text %}
{%- set rose.messages = [{'role': 'system', 'content': content}] %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if rose.results %}
{%- set rose.results = rose.results + '\n' %}
{%- set rose.messages = rose.messages[:-1] %}
{%- endif %}
{%- set rose.results = rose.results + '<tool_response>\n' + message.content %}
{%- set rose.results = rose.results + '\n</tool_response>' %}
{%- set content = [{'type': 'text', 'text': rose.results}] if rose.parts else rose.results %}
{%- set rose.messages = rose.messages + [{'role': 'user', 'content': content}] %}
{%- else %}
{%- set rose.results = '' %}
{%- if message.tool_calls %}
{%- set rose.text = message.content %}
{%- if rose.parts %}
{%- set rose.text = rose.text | map(attribute='text') | join('\n') %}
{%- endif %}
{%- for call in message.tool_calls %}
{%- set written = {'name': call.function.name, 'arguments': call.function.arguments} | tojson %}
{%- set rose.text = rose.text + '@OPEN@\n' + written + '\n@CLOSE@' %}
{%- endfor %}
{%- set content = [{'type': 'text', 'text': rose.text}] if rose.parts else rose.text %}
{%- set rose.messages = rose.messages + [{'role': message.role, 'content': content}] %}
{%- else %}
{%- set rose.messages = rose.messages + [message] %}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- set messages = rose.messages %}
{{- '' }}""".replace("@FORM@", FORM)
    .replace("@OPEN@", OPEN)
    .replace("@CLOSE@", CLOSE)
)


# Variables that every template gets; all others are arguments.
CONVERSATION = frozenset(("messages", "tools", "add_generation_prompt"))


def served_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return an OpenAI function schema as vLLM passes it to a template: missing keys are null, and
    keys that the API doesn't have are removed."""
    function = tool["function"]
    served = {key: function.get(key) for key in ("name", "description", "parameters")}
    given = {key: function.get(key) for key in ("strict", "defer_loading")}
    served |= {key: value for key, value in given.items() if value is not None}
    return {"type": "function", "function": served}


def served_messages(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return messages as vLLM passes them to `template`. A content may be text, null, or a list,
    whose elements are texts or parts with `text`."""
    parts = takes_parts(template)
    served = [_served_message(message, parts) for message in messages]
    developer = any(message["role"] == "developer" for message in served)
    if developer and "'developer'" not in template and '"developer"' not in template:
        return _system_first(served)
    return served


def texts(content: Any) -> list[str]:
    """Return the texts of a message's content."""
    if content is None or isinstance(content, str):
        return [] if content is None else [content]
    return [part if isinstance(part, str) else part["text"] for part in content]


def _served_message(message: dict[str, Any], parts: bool) -> dict[str, Any]:
    """Return a message as vLLM passes it to a template, with its content as `parts` or as text."""
    role, found = message["role"], texts(message.get("content"))
    whole = "\n".join(found if parts else filter(None, found))  # no empty texts, as in vLLM
    served: dict[str, Any] = {"role": role, "content": whole}
    if parts and role != "tool":
        served["content"] = [{"type": "text", "text": text} for text in found]
    if role == "assistant":
        thought = message.get("reasoning")
        thought = message.get("reasoning_content") if thought is None else thought
        if thought is not None:
            served |= {"reasoning": thought, "reasoning_content": thought}
        if calls := message.get("tool_calls"):
            served["tool_calls"] = [_served_call(call) for call in calls]
    if role == "tool" and "tool_call_id" in message:
        served["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        served["name"] = message["name"]
    return served


def _served_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments parsed from JSON, as vLLM passes it to a template."""
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge all system and developer messages into one system message at the front."""
    messages = [
        {**message, "role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]
    at = [i for i, message in enumerate(messages) if message["role"] == "system"]
    if at == [0]:
        return messages
    found = ["\n".join(texts(messages[i]["content"])) for i in at]
    merged = {"role": "system", "content": "\n\n".join(text for text in found if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


@functools.lru_cache(32)
def arguments(template: str) -> frozenset[str]:
    """Return the names of a template's arguments: the variables that it reads besides
    `CONVERSATION`. Return none for an invalid template, which raises when it is first used."""
    try:
        root = _compile_jinja_template(template).environment.parse(template)
    except TemplateError:
        return frozenset()
    return frozenset(meta.find_undeclared_variables(root)) - CONVERSATION


@functools.lru_cache(32)
def takes_parts(template: str) -> bool:
    """True if vLLM passes each message's content to the template as a list of parts. It does so if
    the template loops over a content (vLLM's `_detect_content_format`)."""
    try:
        root = _compile_jinja_template(template).environment.parse(template)
    except TemplateError:
        return False
    first = next(_content_loops(root), None)
    return first is not None and isinstance(first.target, nodes.Name)


def _content_loops(root: nodes.Template) -> Iterator[nodes.For]:
    """Yield the loops that vLLM takes for loops over a message's content (its function
    `_iter_nodes_assign_content_item`). They have three forms:
    1. a loop over `message.content`,
    2. in a macro, a loop over a parameter to which some call passes `message.content`,
    3. outside of macros, a loop over a variable named `content`.
    """
    lists, before = {"messages"}, 0  # names of variables that hold the messages
    # Follow assignments until none adds a name.
    while before < len(lists):
        before = len(lists)
        for assign in root.find_all(nodes.Assign):
            if _name(assign.node) in lists:
                # vLLM can't follow messages into an attribute, and then passes text.
                if not isinstance(assign.target, nodes.Name):
                    return
                lists.add(assign.target.name)
    loops = list(root.find_all(nodes.For))
    items: set[str] = set()  # names of variables that hold one message
    for loop in loops:
        if _name(loop.iter) in lists:
            if not isinstance(loop.target, nodes.Name):
                return  # Nor can vLLM follow messages that a loop unpacks.
            items.add(loop.target.name)
    # id of each loop in a macro -> names of the macro's parameters that get a content from a call
    parameters: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        contents: set[str] = set()
        for call in root.find_all(nodes.Call):
            if _name(call.node) == macro.name:
                bound = [*zip(names, call.args, strict=False)]
                bound += [(each.key, each.value) for each in call.kwargs if each.key in names]
                contents |= {name for name, value in bound if _is_content(value, items)}
        parameters |= {id(loop): contents for loop in macro.find_all(nodes.For)}
    for loop in loops:
        looped = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        if _is_content(loop.iter, items) or looped in parameters.get(id(loop), {"content"}):
            yield loop


def _root(node: nodes.Node) -> nodes.Node:
    """Return the expression without its filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _name(node: nodes.Node) -> str | None:
    """Return the name of the variable that the expression reads; None for other expressions."""
    node = _root(node)
    return node.name if isinstance(node, nodes.Name) and node.ctx == "load" else None


def _is_content(node: nodes.Node, items: set[str]) -> bool:
    """True for `x.content` and `x["content"]` if `items` has the name x."""
    node = _root(node)
    if isinstance(node, nodes.Getitem):
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
    else:
        key = node.attr if isinstance(node, nodes.Getattr) else None
    return key == "content" and isinstance(node.node, nodes.Name) and node.node.name in items
