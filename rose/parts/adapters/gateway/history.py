"""The histories of one trajectory's calls, as a tree of tokens.

1. If a call's messages extend the conversation of a recorded call, message by message, only the
   tokens of the new messages are appended.
2. Otherwise (an edited or compacted history, stripped thoughts, other tools, a sub-agent), a new
   branch begins, and the template renders all of its messages.

Every leaf is a training sample. Tokens that several samples share have mask 1 only in the first of
these samples, so that each token is trained once. Recorded tokens never change: if two calls
continue one node, the node gets two children.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rose.agent.chat import CannotExtend, ChatFormat
from rose.agent.loop import is_cut
from rose.protocol import Branch, TurnResult, pack_floats, pack_tokens, unpack_tokens


@dataclass(frozen=True)
class Call:
    """A tool call in a conversation."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """A message, the same for all APIs. Only an assistant's has `calls` and `thought`."""

    role: str  # system, user, assistant, tool
    text: str
    calls: tuple[Call, ...] = ()
    thought: str = ""
    call_id: str = ""  # id of the call that a tool's message answers
    parts: tuple[str, ...] = ()  # the texts joined in `text`, if there are several
    name: str = ""
    # True if the message came without any text. Templates distinguish that from an empty text.
    empty: bool = False

    @classmethod
    def of(cls, role: str, parts: tuple[str, ...], **others: Any) -> Message:
        """Return a message with the text of `parts`, joined as `vllm serve` does."""
        several = parts if len(parts) > 1 else ()
        return cls(role, "\n".join(parts), parts=several, empty=not parts, **others)

    def key(self) -> list[Any]:
        """Return a key that equal messages share. Ids and the spelling of arguments don't count."""
        calls = [[call.name, call.arguments] for call in self.calls]
        if self.role == "assistant":  # `name` is left out: agents may add it to answers
            return [self.role, self.text.strip(), calls, self.thought.strip(), *self.parts]
        return [self.role, self.text, calls, self.thought.strip(), self.name, *self.parts]

    def rendered(self, chat: ChatFormat) -> dict[str, Any]:
        """Return the message for templates. Special tokens of users and tools become plain text."""
        break_marks = chat.neutral if self.role in ("user", "tool") else str
        message: dict[str, Any] = {
            "role": self.role,
            "content": [*map(break_marks, self.parts)] or break_marks(self.text),
        }
        if self.empty:
            message["content"] = None
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        if self.role == "tool":
            message["tool_call_id"] = self.call_id
        if self.name:
            message["name"] = self.name
        return message


@dataclass(eq=False)
class Node:
    """All tokens of a conversation from its start up to the answer of one call."""

    tokens: bytes  # int32
    mask: bytes  # uint8, 1 where the policy generated the token
    logprobs: bytes  # float32, 0 where mask is 0
    versions: bytes  # int32, -1 where mask is 0
    parent: Node | None
    closed: bool  # True if the last token is an end-of-turn token
    # If a token limit ended the answer, the limit's name (as `Trajectory.limit`); else "".
    limit: str
    turn: int  # number of the turn in its trajectory, from 0
    delivered: bool = False  # True once the agent received the answer
    children: list[Node] = field(default_factory=list)
    conversation: tuple[Message, ...] = ()  # messages with the answer; () for a call by token ids


@dataclass(frozen=True)
class Place:
    """The node that a call continues (None: a new root), and the new tokens that follow it."""

    parent: Node | None
    new: list[int]

    @property
    def context(self) -> bytes:
        """The turn's prompt, int32: all tokens before the answer."""
        return (self.parent.tokens if self.parent else b"") + pack_tokens(self.new)


class History:
    """The tree of one trajectory's calls."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._roots: list[Node] = []
        self._after: dict[bytes, Node] = {}  # digest of a conversation with its answer -> node

    def place(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]],
        template_args: dict[str, Any] | None = None,
    ) -> Place:
        """Return the place of a call: after the longest recorded conversation that it extends, else
        at a new root. Raises `CannotExtend` if the template refuses the messages or arguments."""
        chat = self._chat.with_args(template_args or {})
        known = digests(messages, tools, chat.template_args)
        for length in range(len(messages) - 1, 0, -1):
            node = self._after.get(known[length])
            if node is not None and messages[length - 1].role == "assistant":
                system = any(m.role in ("system", "developer") for m in messages[:length])
                new = _appended(chat, messages[length:], node, bool(tools), system)
                if new is not None:
                    return Place(node, new)
        rendered = [message.rendered(chat) for message in messages]
        return Place(None, chat.start(rendered, tools))

    def place_tokens(self, tokens: Sequence[int]) -> Place:
        """Return the place of a call by token ids: after the longest node that `tokens` extend."""
        packed = pack_tokens(tokens)
        best: Node | None = None
        for node in self._nodes():
            longer = best is None or len(node.tokens) > len(best.tokens)
            if longer and len(node.tokens) < len(packed) and packed.startswith(node.tokens):
                best = node
        known = len(best.tokens) // 4 if best else 0
        return Place(best, list(tokens[known:]))

    def record(self, place: Place, result: TurnResult, limit: str = "") -> Node:
        """Add the turn that the policy generated at `place`, and return its node. `limit`: name of
        the limit that bounded the turn's tokens."""
        parent, new, made = place.parent, len(place.new), len(result.tokens) // 4
        closed = int(unpack_tokens(result.tokens)[-1]) in self._chat.eos_ids
        node = Node(
            place.context + result.tokens,
            (parent.mask if parent else b"") + bytes(new) + b"\x01" * made,
            (parent.logprobs if parent else b"") + pack_floats([0.0]) * new + result.logprobs,
            (parent.versions if parent else b"") + pack_tokens([-1]) * new + result.versions,
            parent,
            closed,
            limit if is_cut(result.finish, closed) else "",
            int(result.turn.rpartition(".t")[2]),
        )
        (parent.children if parent else self._roots).append(node)
        return node

    def answered(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]],
        answer: Message,
        node: Node,
        template_args: dict[str, Any] | None = None,
    ) -> None:
        """Record that a later call that begins with `messages` and `answer` continues `node`."""
        node.conversation = (*messages, answer)
        given = self._chat.with_args(template_args or {}).template_args
        self._after.setdefault(digests([*messages, answer], tools, given)[-1], node)

    def leaves(self) -> list[Node]:
        """Drop answers neither delivered nor continued. Return the leaves, the longest first."""
        for node in reversed(self._nodes()):
            if not node.delivered and not node.children:
                (node.parent.children if node.parent else self._roots).remove(node)
        leaves = [node for node in self._nodes() if not node.children]
        return sorted(leaves, key=lambda leaf: -len(leaf.mask))

    def branches(self) -> list[Branch]:
        """Return a training sample for each leaf, the longest first."""
        seen: set[int] = set()
        return [_branch(leaf, seen) for leaf in self.leaves()]

    def _nodes(self) -> list[Node]:
        """Return all nodes, parents before their children."""
        found, at = list(self._roots), 0
        while at < len(found):
            found += found[at].children
            at += 1
        return found


def _appended(
    chat: ChatFormat, new: Sequence[Message], node: Node, tools: bool, system: bool
) -> list[int] | None:
    """Return the tokens of the messages after the node's answer; None if they can't be appended."""
    if any(message.role not in ("user", "tool") for message in new):
        return None
    try:
        said = [message.rendered(chat) for message in new]
        return chat.observations(said, node.closed, tools, system)
    except CannotExtend:
        return None


def _branch(leaf: Node, seen: set[int]) -> Branch:
    """Return a leaf's training sample. `seen` has the ids of the nodes that earlier samples train;
    the nodes of this sample are added to it."""
    node, shared = leaf, 0
    turns: list[tuple[int, int]] = []  # (turn, number of its tokens), the last turn first
    while node is not None:
        if id(node) in seen and not shared:
            shared = len(node.mask)
        if not shared:
            before = node.parent.mask if node.parent else b""
            turns.append((node.turn, node.mask.count(1) - before.count(1)))
        seen.add(id(node))
        node = node.parent
    return Branch(
        leaf.tokens,
        bytes(shared) + leaf.mask[shared:],
        bytes(4 * shared) + leaf.logprobs[4 * shared :],
        pack_tokens([-1]) * shared + leaf.versions[4 * shared :],
        turns[::-1],
    )


def digests(
    messages: Sequence[Message], tools: list[dict[str, Any]], template_args: dict[str, Any]
) -> list[bytes]:
    """Return digests; element i covers the template's arguments, the tools and i messages."""
    found = [hashlib.sha256(_canonical_json([tools, template_args])).digest()]
    for message in messages:
        found.append(hashlib.sha256(found[-1] + _canonical_json(message.key())).digest())
    return found


def _canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
