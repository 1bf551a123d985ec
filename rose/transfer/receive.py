"""One reader's side of a store: from the version it holds to the one it wants, by whatever way is
left."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from rose.transfer.blocks import rectangles
from rose.transfer.edge import Edge, list_edges, read_plan
from rose.transfer.errors import Corrupted, Missing, TransferError
from rose.transfer.live import Live, Place
from rose.transfer.relay_client import open_source
from rose.transfer.source import Mirrored, read_token
from rose.transfer.stage import Staged, WrongBase, stage
from rose.transfer.store import FULL, INITIAL, Plan, Step, edge_name


class Receiver:
    """`store`: a folder or a relay's URL; `mirror`: a folder of what this node was sent, read
    first. `places` maps a plan to where its blocks lie in the live parameters.

    Raises `TransferError` when the store can't be opened.
    """

    def __init__(
        self,
        store: str,
        mirror: str | None,
        token_file: str | None,
        places: Callable[[Plan, Live], dict[int, Place]],
        live: Live,
    ):
        self.where = (store, mirror)
        token = read_token(token_file) if token_file else None
        self._source = open_source(store, token)
        if mirror:
            self._source = Mirrored(self._source, mirror)
        self._live = live
        self._plan, self._plan_hash = read_plan(self._source)
        self._places = places(self._plan, live)
        self.lineage = self._plan.lineage
        # of the version that was staged last
        self._digests: tuple[int | None, dict[int, bytes]] = (None, {})
        self._staged = 0  # versions
        self._useless: set[Step] = set()  # while one version is being staged
        self._why: list[str] = []

    def stage(
        self,
        have: int | None,
        want: int,
        threads: int,
        dense_bytes: int,
        timeout_s: float,
        device_bytes: int | None = None,
        verify_every: int = 1,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Staged:
        """`have`: the version in the live weights, null if none that can be built on.
        `device_bytes`: see `rose.transfer.stage.stage`. `wanted` is asked now and then: once it
        says no, nothing is staged.

        Every live block is compared with the manifest's hash at the first version, at one that
        comes by several edges or in full, and else at one of `verify_every`, each time other
        blocks: a value that went wrong in the live weights is found within that many versions, and
        the newest full version mends it. An edge that is damaged, or was removed meanwhile, is left
        out, a wrong base too, until a route works. Raises `TransferError` saying what is there and
        what was wrong with the rest, that it took over `timeout_s` seconds, or is not wanted any
        more.
        """
        if have == want:
            return Staged(self._live, self._places, 1)
        end = time.monotonic() + timeout_s
        self._useless, self._why = set(), []
        while True:
            route = self._route(have, want)
            names = [edge.name for edge in route]

            def tick(names: list[str] = names) -> None:
                if not wanted():
                    raise TransferError(f"version {want} is not wanted any more")
                if time.monotonic() > end:
                    raise TransferError(
                        f"version {want} was not staged within {timeout_s:g} s, by "
                        + ", ".join(names)
                    )

            try:
                tick()
                staged = stage(
                    self._live,
                    self._plan,
                    self._places,
                    route,
                    have is not None and route[0].base is not FULL,
                    threads,
                    dense_bytes,
                    tick,
                    device_bytes,
                    self._compared(have, verify_every),
                )
            except WrongBase as error:
                have = None
                self._why.append(str(error))
            except (Corrupted, Missing) as error:
                self._useless.add((error.edge.version, error.edge.base))
                self._why.append(str(error))
            else:
                self._staged += 1
                self._digests = want, staged.digests
                staged.route = names
                if isinstance(self._source, Mirrored):
                    staged.mirrored = sum(map(self._source.mirrors, names))
                return staged

    def close(self) -> None:
        self._source.close()

    def _compared(self, have: int | None, verify_every: int) -> Callable[[int], bytes | None]:
        """See `rose.transfer.stage.stage`: what was said of `have`'s blocks when it was staged
        here, but for those whose turn it is to be compared again."""
        version, digests = self._digests
        if have is None or version != have:
            return lambda block: None
        turn = self._staged % verify_every
        return lambda block: None if block % verify_every == turn else digests.get(block)

    def _route(self, have: int | None, want: int) -> list[Edge]:
        """Opened: the edge from `have` to `want`, or the route with the fewest bytes. Raises
        `TransferError`, saying what is there and what was tried."""
        if have is not None and (edge := self._open(want, have)) is not None:
            return [edge]
        if routes := self._routes(have, want):
            return min(routes, key=lambda route: sum(edge.nbytes for edge in route))
        held = {None: "nothing that can be built on", INITIAL: "the model folder's weights"}
        edges = sorted(list_edges(self._source), key=lambda e: (e[0], e[1] is FULL, e[1] or 0))
        here = ", ".join(edge_name(*e) for e in edges if e not in self._useless)
        raise TransferError(
            f"version {want} can't be reached from {held.get(have, f'version {have}')}: the store "
            f"has {here or 'no edge'}" + "".join(f"; {reason}" for reason in self._why)
        )

    def _routes(self, have: int | None, want: int) -> list[list[Edge]]:
        """The differences back from `want` lead to the newest version that is there in full, to
        one that is there from the initial weights if these are held, and to `have`."""
        found, tail, at = [], [], want
        starts = [FULL, INITIAL] if have == INITIAL else [FULL]
        while at != have:
            bases = {base for _, base in list_edges(self._source, at)}
            for base in [base for base in starts if base in bases]:
                if (edge := self._open(at, base)) is not None:
                    found.append([edge, *tail])
                    starts.remove(base)
            before = max(bases - {FULL, INITIAL}, default=None)
            enough = found and (have is None or have == INITIAL or at < have)
            edge = None if before is None or enough else self._open(at, before)
            if edge is None:
                return found
            tail, at = [edge, *tail], before
        return [*found, tail]

    def _open(self, version: int, base: int | None) -> Edge | None:
        """Null if it is not there, or of no use."""
        step = version, base
        if step in self._useless:
            return None
        try:
            return Edge(self._source, *step, self._plan, self._plan_hash)
        except (Missing, Corrupted) as error:
            self._useless.add(step)
            if isinstance(error, Corrupted):
                self._why.append(str(error))
        return None


def materialise(store: str | Path, version: int) -> dict[str, torch.Tensor]:
    """All tensors of a version of a store, whole, in host memory: for tools and tests. Raises
    `TransferError`."""
    source = open_source(store)
    plan, _ = read_plan(source)
    source.close()
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    tensors = {t.name: torch.zeros(t.shape, dtype=dtypes[t.dtype]) for t in plan.tensors}
    live = Live(tensors)
    receiver = Receiver(str(store), None, None, whole, live)
    receiver.stage(None, version, 1, sum(t.nbytes for t in tensors.values()), 3600.0).flip()
    receiver.close()
    return tensors


def whole(plan: Plan, live: Live) -> dict[int, Place]:
    """Places in parameters that are the store's tensors themselves."""
    return {
        number: Place(
            plan.tensors[block.tensor].name, rectangles(block, plan.tensors[block.tensor].columns)
        )
        for number, block in enumerate(plan.blocks)
    }
