"""The loops over a group's texts, compiled by numba: append, look up, learn from what came.

A group's texts are nodes of one tree: of node j, `TOKEN` is its token, `BEFORE` the node before it,
`AFTER` the first node that followed it, each -1 if there is none. Nodes that follow the same LONG
(SHORT) tokens are linked from the newest to the oldest, `heads` has the newest by a hash of these
tokens; as different tokens may share a hash, matches are always compared. All in one file,
constants too: numba's cache notices a change only of the file that a function stands in.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

TOKEN, BEFORE, AFTER, LINK_SHORT, LINK_LONG = range(5)
ROWS = 5
SHORT, LONG = 2, 5  # tokens of context by which nodes are found: two also meet in free text
DEPTH = 16  # tokens of context that are compared: longer matches are no better
CANDIDATES = 32  # newest places looked at, by each length: a lookup stays below 30 us
LEVELS = (2, 4, 8, 16)  # tokens matched, from which on drafts of a longer match are told apart
TRIED = 2  # of these levels, the longest that some place has
SHARES = 8  # levels of agreement between the places that match
LEAST = 0.02  # chance below which a draft is not continued
TRUST = 8.0  # trials of a group that weigh as much as all groups' experience
FORGET_ALL, FORGET_GROUP = 1024.0, 128.0  # trials, from which on earlier ones count half

INT = types.int64
NODES = types.Array(types.int32, 2, "C")
INTS = types.Array(types.int32, 1, "A")
TABLE = types.Array(types.float64, 2, "C")
FLOATS = types.Array(types.float64, 1, "C")
PATH = types.Array(types.int32, 2, "C")


def _compile(signature):
    return numba.njit(signature, nogil=True, cache=True)


@_compile(INT(NODES, INT, INT, INT))
def _key(nodes, node, length, mask):
    """Hash of the `length` tokens that end with `node`; -1 if there are fewer."""
    value = np.uint64(14695981039346656037)
    for _ in range(length):
        if node < 0:
            return -1
        value = (value ^ np.uint64(nodes[TOKEN, node])) * np.uint64(1099511628211)
        node = nodes[BEFORE, node]
    return INT((value ^ (value >> np.uint64(29))) & np.uint64(mask))


@_compile(types.void(NODES, NODES, INT))
def _insert(nodes, heads, node):
    mask = heads.shape[1] - 1
    for which in range(2):
        key = _key(nodes, nodes[BEFORE, node], LONG if which else SHORT, mask)
        nodes[LINK_SHORT + which, node] = -1
        if key >= 0:
            nodes[LINK_SHORT + which, node] = heads[which, key]
            heads[which, key] = node


@_compile(types.void(NODES, NODES, INT))
def rebuild(nodes, heads, used):
    """Fill empty `heads` with the first `used` nodes."""
    for node in range(used):
        _insert(nodes, heads, node)


@_compile(INT(NODES, NODES, INT, INT, INTS))
def extend(nodes, heads, used, tail, tokens):
    """Write `tokens` after node `tail` (-1: a new beginning) into nodes from `used` on, for which
    there must be room; the last node."""
    for i in range(tokens.shape[0]):
        node = used + i
        nodes[TOKEN, node] = tokens[i]
        nodes[BEFORE, node] = tail
        nodes[AFTER, node] = -1
        if tail >= 0 and nodes[AFTER, tail] < 0:
            nodes[AFTER, tail] = node
        _insert(nodes, heads, node)
        tail = node
    return tail


@_compile(INT(NODES, INT, INTS))
def follow(nodes, used, tokens):
    """How many of `tokens` stand at the beginning of the first text: nodes 0, 1, ..."""
    most = min(used, tokens.shape[0])
    for i in range(most):
        if nodes[TOKEN, i] != tokens[i] or nodes[BEFORE, i] != i - 1:
            return i
    return most


@_compile(types.boolean(NODES, INT, INTS))
def ends_with(nodes, tail, tokens):
    """Whether the text that ends at node `tail` ends with `tokens`."""
    for i in range(tokens.shape[0] - 1, -1, -1):
        if tail < 0 or nodes[TOKEN, tail] != tokens[i]:
            return False
        tail = nodes[BEFORE, tail]
    return True


@_compile(INT(NODES, INT, INT))
def _match(nodes, one, other):
    """How many of the last DEPTH tokens of two texts are equal."""
    count = 0
    while count < DEPTH and one >= 0 and other >= 0:
        if one == other:
            return DEPTH
        if nodes[TOKEN, one] != nodes[TOKEN, other]:
            break
        one, other, count = nodes[BEFORE, one], nodes[BEFORE, other], count + 1
    return count


@_compile(INT(INT, INT, INT))
def kind_of(match, agree, of):
    """The row of an acceptance table for a token that `agree` of `of` places have, which match so
    many tokens."""
    level = 0
    while level + 1 < len(LEVELS) and match >= LEVELS[level + 1]:
        level += 1
    share = agree / of
    if agree == of:
        agreement = 0 if of == 1 else 1 if of < 4 else 2
    elif share >= 0.9:
        agreement = 3
    elif share >= 0.7:
        agreement = 4
    elif share >= 0.5:
        agreement = 5
    elif share >= 0.3:
        agreement = 6
    else:
        agreement = 7
    return level * SHARES + agreement


@_compile(INT(NODES, NODES, INT, INTS, INTS))
def _find(nodes, heads, tail, places, matches):
    """Write the nodes after which the text is like that before `tail` into `places`, and how many
    tokens are alike into `matches`. Return their number."""
    found, mask = 0, heads.shape[1] - 1
    for which in (1, 0):
        key = _key(nodes, tail, LONG if which else SHORT, mask)
        if key < 0:
            continue
        node, looked, before = heads[which, key], 0, found
        while node >= 0 and looked < CANDIDATES:
            looked += 1
            match = _match(nodes, nodes[BEFORE, node], tail)
            # The search by LONG tokens has found the longer matches already.
            if match >= SHORT and (which or match < LONG or before == 0):
                places[found], matches[found] = node, match
                found += 1
            node = nodes[LINK_SHORT + which, node]
    return found


@_compile(INT(INT, INTS, INTS, INT, INTS))
def _matching(found, places, matches, level, alive):
    """Write the places that match at least LEVELS[level] tokens into `alive`. Return their number,
    0 where each of them matches at the next level, too."""
    count, exact = 0, False
    for i in range(found):
        if matches[i] >= LEVELS[level]:
            alive[count] = places[i]
            count += 1
            exact = exact or level + 1 == len(LEVELS) or matches[i] < LEVELS[level + 1]
    return count if exact else 0


@_compile(types.UniTuple(INT, 2)(NODES, INTS, INT))
def _majority(nodes, alive, count):
    """Return the token that most of the first `count` places have, and how many have it."""
    winner, agree = -1, 0
    for i in range(count):
        token, same = nodes[TOKEN, alive[i]], 0
        for j in range(count):
            same += nodes[TOKEN, alive[j]] == token
        if same > agree:
            winner, agree = token, same
        if 2 * agree > count:
            break
    return winner, agree


@_compile(INT(NODES, INTS, INT, INT))
def _advance(nodes, alive, count, winner):
    """Replace the places that have the token `winner` by those after them. Return their number."""
    kept = 0
    for i in range(count):
        if nodes[TOKEN, alive[i]] == winner and nodes[AFTER, alive[i]] >= 0:
            alive[kept] = nodes[AFTER, alive[i]]
            kept += 1
    return kept


@_compile(INT(NODES, NODES, INT, INT, TABLE, TABLE, PATH, FLOATS))
def look_up(nodes, heads, tail, most, overall, group, path, chances):
    """Draft at most `most` tokens after node `tail`: the draft of which most tokens are expected to
    be accepted. Return its length.

    `path[0]` receives the tokens, `path[1]` their rows of the acceptance tables, and `chances` the
    chance that a token and all before it are accepted.
    """
    places = np.empty(2 * CANDIDATES, np.int32)
    matches = np.empty(2 * CANDIDATES, np.int32)
    found = _find(nodes, heads, tail, places, matches)
    alive = np.empty(2 * CANDIDATES, np.int32)
    tokens = np.empty(most, np.int32)
    kinds = np.empty(most, np.int32)
    chance = np.empty(most, np.float64)
    best, best_gain, tried = 0, 0.0, 0
    for level in range(len(LEVELS) - 1, -1, -1):
        count = _matching(found, places, matches, level, alive)
        if count == 0:
            continue
        tried += 1
        if tried > TRIED:
            break
        length, product, gain = 0, 1.0, 0.0
        while length < most and count > 0:
            winner, agree = _majority(nodes, alive, count)
            kind = kind_of(LEVELS[level] + length, agree, count)
            prior = overall[kind, 0] / overall[kind, 1]
            product *= (group[kind, 0] + TRUST * prior) / (group[kind, 1] + TRUST)
            if product < LEAST:
                break
            tokens[length], kinds[length], chance[length] = winner, kind, product
            length, gain = length + 1, gain + product
            count = _advance(nodes, alive, count, winner)
        if gain > best_gain:
            best, best_gain = length, gain
            for i in range(length):
                path[0, i], path[1, i], chances[i] = tokens[i], kinds[i], chance[i]
    return best


@_compile(types.void(TABLE, INT, types.boolean, types.float64))
def _count(table, kind, hit, forget):
    table[kind, 0] += hit
    table[kind, 1] += 1
    if table[kind, 1] > forget:
        table[kind, 0] /= 2
        table[kind, 1] /= 2


@_compile(types.void(PATH, INT, INTS, TABLE, TABLE))
def learn(path, count, came, overall, group):
    """Count a draft of `count` tokens, whether vLLM got it or not, against the tokens that were
    sampled in its place: the first that differs ends it."""
    for i in range(min(count, came.shape[0])):
        hit = path[0, i] == came[i]
        _count(overall, path[1, i], hit, FORGET_ALL)
        _count(group, path[1, i], hit, FORGET_GROUP)
        if not hit:
            break
