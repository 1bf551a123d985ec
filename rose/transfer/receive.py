"""Receive versions: choose edges from a reader's version to the wanted one, and stage them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from rose.transfer.blocks import rectangles
from rose.transfer.edge import Edge, list_edges, read_plan
from rose.transfer.errors import Corrupted, Missing, TransferError
from rose.transfer.live import Live, Place
from rose.transfer.source import Mirrored, open_source, read_token
from rose.transfer.stage import Staged, WrongBase, stage
from rose.transfer.store import FULL, INITIAL, Plan, Step, edge_name


class Receiver:
    """A reader of `store`, a folder or a relay's URL. Files that this node's `mirror` has are read
    there first. `places` maps a plan to the places of its blocks in the live parameters. Raises
    `TransferError` if the store can't be opened."""

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
        # The version that was staged last, and the digests of its blocks.
        self._digests: tuple[int | None, dict[int, bytes]] = (None, {})
        self._staged = 0  # versions staged so far
        # The edges that failed while the current version is being staged, and the errors.
        self._unusable: set[Step] = set()
        self._errors: list[str] = []

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
        """Stage version `want`. `have` is the version in the live weights, or None if no edge can
        build on them. `rose.transfer.stage.stage` explains `device_bytes`. `wanted` is called
        repeatedly and cancels the staging when it returns false.

        Every live block is compared with the manifest's hash at the first version, and at a version
        that needs several edges or is full. At other versions each block is compared once in
        `verify_every` versions. So a wrong live value is found within that many versions, and the
        newest full version repairs it. Routes are tried until one works; edges found damaged or
        removed, and a wrong base, are avoided. Raises `TransferError` with all failures if none
        works, if cancelled, or after `timeout_s` seconds."""
        if have == want:
            return Staged(self._live, self._places, 1)
        end = time.monotonic() + timeout_s
        self._unusable, self._errors = set(), []
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
                    self._known_digests(have, verify_every),
                )
            except WrongBase as error:
                have = None
                self._errors.append(str(error))
            except (Corrupted, Missing) as error:
                self._unusable.add((error.edge.version, error.edge.base))
                self._errors.append(str(error))
            else:
                self._staged += 1
                self._digests = want, staged.digests
                staged.route = names
                if isinstance(self._source, Mirrored):
                    staged.mirrored = sum(map(self._source.mirrors, names))
                return staged

    def close(self) -> None:
        self._source.close()

    def _known_digests(self, have: int | None, verify_every: int) -> Callable[[int], bytes | None]:
        """Return `known_digest` for `rose.transfer.stage.stage`: digests of `have` from when it was
        staged here, but none for blocks that are due to be compared again."""
        version, digests = self._digests
        if have is None or version != have:
            return lambda block: None
        due = self._staged % verify_every
        return lambda block: None if block % verify_every == due else digests.get(block)

    def _route(self, have: int | None, want: int) -> list[Edge]:
        """Return the edge from `have` to `want`, or else the route with the fewest bytes. Raises
        `TransferError`, which names the edges in the store and what was tried."""
        if have is not None and (edge := self._open(want, have)) is not None:
            return [edge]
        if routes := self._routes(have, want):
            return min(routes, key=lambda route: sum(edge.nbytes for edge in route))
        held = {None: "nothing that can be built on", INITIAL: "the model folder's weights"}
        edges = sorted(list_edges(self._source), key=lambda e: (e[0], e[1] is FULL, e[1] or 0))
        here = ", ".join(edge_name(*e) for e in edges if e not in self._unusable)
        raise TransferError(
            f"version {want} can't be reached from {held.get(have, f'version {have}')}: the store "
            f"has {here or 'no edge'}" + "".join(f"; {error}" for error in self._errors)
        )

    def _routes(self, have: int | None, want: int) -> list[list[Edge]]:
        """Return the routes to `want`: from `have`, from the newest full version and, if the reader
        has the initial weights, from those. Deltas lead from there to `want`."""
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
        """Open an edge; return None if it does not exist or has failed."""
        step = version, base
        if step in self._unusable:
            return None
        try:
            return Edge(self._source, *step, self._plan, self._plan_hash)
        except (Missing, Corrupted) as error:
            self._unusable.add(step)
            if isinstance(error, Corrupted):
                self._errors.append(str(error))
        return None


def materialise(store: str | Path, version: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a store's version, whole, in host memory, for tools and tests. Raises
    `TransferError`."""
    with closing(open_source(store)) as source:
        plan, _ = read_plan(source)
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    tensors = {t.name: torch.zeros(t.shape, dtype=dtypes[t.dtype]) for t in plan.tensors}
    live = Live(tensors)
    with closing(Receiver(str(store), None, None, whole, live)) as receiver:
        receiver.stage(None, version, 1, sum(t.nbytes for t in tensors.values()), 3600.0).flip()
    return tensors


def whole(plan: Plan, live: Live) -> dict[int, Place]:
    """Return the places of a plan's blocks in parameters that are the store's whole tensors."""
    return {
        number: Place(
            plan.tensors[block.tensor].name, rectangles(block, plan.tensors[block.tensor].columns)
        )
        for number, block in enumerate(plan.blocks)
    }
