"""Which edges take a reader from the version that it holds to the one that it wants.

The store's edges are a graph over versions: v-1 -> v for each version, squashed ones v - 2^j -> v
where 2^j divides v (so k versions are bridged by at most about 2 log2 k edges, as in a skip list),
and full ones from nothing. Of the route with the fewest edges from what is held, and the one from
the newest full version, the one with less to read wins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from rose.transfer.errors import TransferError
from rose.transfer.source import Source
from rose.transfer.store import FULL, INITIAL, edge_name, parse_edge

Step = tuple[int, int | None]  # (version, base)


def present(source: Source, version: int | None = None) -> set[Step]:
    """The edges of which there is a folder, of one version or of all; whether they are committed,
    reading tells."""
    folders = [f"v{version:06d}"] if version is not None else source.names("")
    found = {
        parse_edge(folder, origin)
        for folder in folders
        if folder.startswith("v")
        for origin in source.names(folder)
    }
    return found - {None}


def candidates(edges: Iterable[Step], have: int | None, want: int) -> list[list[Step]]:
    """The shortest route from `have` (null: nothing usable is held), and the shortest from the
    newest full version that leads to `want`; those that exist."""
    edges = [edge for edge in edges if edge[0] <= want]
    found = []
    if have is not None and have != want:
        found.append(shortest(edges, have, want))
    for full in sorted((version for version, base in edges if base is FULL), reverse=True):
        tail = [] if full == want else shortest(edges, full, want)
        if tail is not None:
            found.append([(full, FULL), *tail])
            break
    return [route for route in found if route]


def shortest(edges: list[Step], have: int, want: int) -> list[Step] | None:
    """Breadth first; among equals the one whose last steps are the longest."""
    onwards: dict[int, list[Step]] = {}
    for version, base in edges:
        if base is not FULL:
            onwards.setdefault(base, []).append((version, base))
    came: dict[int, Step | None] = {have: None}
    queue = deque([have])
    while queue:
        at = queue.popleft()
        for edge in sorted(onwards.get(at, []), reverse=True):
            if edge[0] not in came:
                came[edge[0]] = edge
                queue.append(edge[0])
    if want not in came:
        return None
    route: list[Step] = []
    at = want
    while came[at] is not None:
        route.append(came[at])
        at = came[at][1]
    return route[::-1]


def choose(
    edges: set[Step], have: int | None, want: int, nbytes: Callable[[Step], int], why: list[str]
) -> list[Step]:
    """The route with the least to read. Raises `TransferError` saying what is there and, from
    `why`, what was tried."""
    routes = candidates(edges, have, want)
    if not routes:
        here = ", ".join(
            edge_name(*edge)
            for edge in sorted(edges, key=lambda e: (e[0], e[1] is None, e[1] or 0))
        )
        held = {None: "nothing that can be built on", INITIAL: "the model folder's weights"}.get(
            have, f"version {have}"
        )
        raise TransferError(
            f"version {want} can't be reached from {held}: the store has {here or 'no edge'}"
            + "".join(f"; {reason}" for reason in why)
        )
    return min(routes, key=lambda route: sum(nbytes(step) for step in route))
