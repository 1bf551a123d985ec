"""The loops over a group's texts, compiled by numba: append, look up, and learn from the outcome.

A group's texts form one tree with a node per token. For node j, `nodes[TOKEN, j]` is the token,
`nodes[BEFORE, j]` the node before it, and `nodes[AFTER, j]` the first node that followed it; -1
means none. All nodes that follow the same LONG (or SHORT) tokens form a list, linked from the
newest to the oldest. `heads` has the newest node of each list, by a hash of these tokens. Different
tokens may share a hash, so matches are always compared. A *place* is a node whose preceding tokens
match the end of a text; its token may be the text's next one.

Functions and constants are in one file, because numba's cache only notices a change of the file
that a function is defined in.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

TOKEN, BEFORE, AFTER, LINK_SHORT, LINK_LONG = range(5)
ROWS = 5
# Context lengths, in tokens, by which nodes are found. Free text repeats as few as two tokens.
SHORT = 2
LONG = 5
DEPTH = 16  # most tokens of context that are compared; longer matches are no better
CANDIDATES = 32  # most places examined per context length, newest first; at most 30 us a lookup
LEVELS = (2, 4, 8, 16)  # least matched tokens of each level, which has chances of its own
LEVELS_TRIED = 2  # number of levels for which a draft is built, from the longest match down
SHARES = 8  # number of classes of agreement between the matching places
LEAST_SHARES = (0.9, 0.7, 0.5, 0.3)  # least agreement of classes 3 to 6; 7 for all below
MIN_CHANCE = 0.02  # chance of a token below which a draft ends
GROUP_TRIALS = 8.0  # trials of a group that weigh as much as those of all groups
# Trials of a kind (`kind_of`) after which its counts are halved, so that earlier ones fade.
HALVE_OVERALL = 1024.0
HALVE_GROUP = 128.0

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
    """Hash the `length` tokens that end with `node`; return -1 if there are fewer."""
    value = np.uint64(14695981039346656037)
    for _ in range(length):
        if node < 0:
            return -1
        value = (value ^ np.uint64(nodes[TOKEN, node])) * np.uint64(1099511628211)
        node = nodes[BEFORE, node]
    return INT((value ^ (value >> np.uint64(29))) & np.uint64(mask))


@_compile(types.void(NODES, NODES, INT))
def _insert(nodes, heads, node):
    """Add `node` to the lists of its SHORT and LONG preceding tokens."""
    mask = heads.shape[1] - 1
    for which in range(2):
        key = _key(nodes, nodes[BEFORE, node], LONG if which else SHORT, mask)
        nodes[LINK_SHORT + which, node] = -1
        if key >= 0:
            nodes[LINK_SHORT + which, node] = heads[which, key]
            heads[which, key] = node


@_compile(types.void(NODES, NODES, INT))
def rebuild(nodes, heads, used):
    """Add the first `used` nodes to their lists. `heads` must be empty."""
    for node in range(used):
        _insert(nodes, heads, node)


@_compile(INT(NODES, NODES, INT, INT, INTS))
def extend(nodes, heads, used, tail, tokens):
    """Append `tokens` after node `tail`, or as a new text if `tail` is -1; return the last node.
    Writes nodes from `used` on, for which `nodes` must have room."""
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
    """Count the leading `tokens` that equal the beginning of the first text (nodes 0, 1, ...)."""
    most = min(used, tokens.shape[0])
    for i in range(most):
        if nodes[TOKEN, i] != tokens[i] or nodes[BEFORE, i] != i - 1:
            return i
    return most


@_compile(types.boolean(NODES, INT, INTS))
def ends_with(nodes, tail, tokens):
    """Return True if the text that ends at node `tail` ends with `tokens`."""
    for i in range(tokens.shape[0] - 1, -1, -1):
        if tail < 0 or nodes[TOKEN, tail] != tokens[i]:
            return False
        tail = nodes[BEFORE, tail]
    return True


@_compile(INT(NODES, INT, INT))
def _match(nodes, one, other):
    """Count how many last tokens two texts have in common, at most DEPTH. The texts end with nodes
    `one` and `other`."""
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
    """Return the acceptance table's row for a drafted token, which `agree` of `of` places have.
    `match` is the number of tokens that these places match."""
    level = 0
    while level + 1 < len(LEVELS) and match >= LEVELS[level + 1]:
        level += 1
    if agree == of:
        agreement = 0 if of == 1 else 1 if of < 4 else 2
    else:
        agreement = 3
        while agreement + 1 < SHARES and agree / of < LEAST_SHARES[agreement - 3]:
            agreement += 1
    return level * SHARES + agreement


@_compile(INT(NODES, NODES, INT, INTS, INTS))
def _find(nodes, heads, tail, places, matches):
    """Find nodes whose preceding text matches the text that ends at `tail`; return their number.
    Writes the nodes into `places`, and the number of matching tokens into `matches`."""
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
    """Write the places that match at least LEVELS[level] tokens into `alive`; return their number.
    Returns 0 if all of them also match at the next level, at which they were tried before."""
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
    """Keep the places whose token is `winner` and move each to the node after it; return their
    number."""
    kept = 0
    for i in range(count):
        if nodes[TOKEN, alive[i]] == winner and nodes[AFTER, alive[i]] >= 0:
            alive[kept] = nodes[AFTER, alive[i]]
            kept += 1
    return kept


@_compile(INT(NODES, NODES, INT, INT, TABLE, TABLE, PATH, FLOATS))
def look_up(nodes, heads, tail, most, overall, group, path, chances):
    """Draft at most `most` tokens after node `tail`; return the draft's length.

    Builds drafts for `LEVELS_TRIED` levels, and takes the draft with the most expected accepted
    tokens. Writes its tokens into `path[0]`, and their rows of the acceptance tables into
    `path[1]`. `chances` receives the chance that a token and all before it are accepted."""
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
        if tried > LEVELS_TRIED:
            break
        length, product, gain = 0, 1.0, 0.0
        while length < most and count > 0:
            winner, agree = _majority(nodes, alive, count)
            kind = kind_of(LEVELS[level] + length, agree, count)
            prior = overall[kind, 0] / overall[kind, 1]
            product *= (group[kind, 0] + GROUP_TRIALS * prior) / (group[kind, 1] + GROUP_TRIALS)
            if product < MIN_CHANCE:
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
def _count(table, kind, hit, halve_after):
    """Count a trial of `kind`. After `halve_after` trials, halve both counts."""
    table[kind, 0] += hit
    table[kind, 1] += 1
    if table[kind, 1] > halve_after:
        table[kind, 0] /= 2
        table[kind, 1] /= 2


@_compile(types.void(PATH, INT, INTS, TABLE, TABLE))
def learn(path, count, sampled, overall, group):
    """Compare a draft of `count` tokens with the tokens that were `sampled` in its place. Counts a
    trial for each drafted token up to the first that differs, even if vLLM never got the draft."""
    for i in range(min(count, sampled.shape[0])):
        hit = path[0, i] == sampled[i]
        _count(overall, path[1, i], hit, HALVE_OVERALL)
        _count(group, path[1, i], hit, HALVE_GROUP)
        if not hit:
            break
