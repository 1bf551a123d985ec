"""One reader's side of a store: from the version it holds to the one it wants, by whatever way is
left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from rose.transfer.blocks import rectangles
from rose.transfer.edge import Edge, MirroredEdge, StoredEdge, read_plan
from rose.transfer.errors import Corrupted, Missing, TransferError
from rose.transfer.route import Step, choose, present
from rose.transfer.source import Source, open_source, read_token
from rose.transfer.stage import Live, Place, Staged, WrongBase, stage
from rose.transfer.store import Plan, edge_name

LEASE_S = 120.0  # a reader that says nothing for so long is gone
RENEW_S = 30.0


class Receiver:
    """`store`: a folder or a relay's URL; `mirror`: a folder of what this node was sent, tried
    first. `places` maps a plan to where its blocks lie in the live parameters. `holder` names the
    reader among all of the store's.

    Raises `TransferError` when the store can't be opened.
    """

    def __init__(
        self,
        store: str,
        mirror: str | None,
        token_file: str | None,
        places: Callable[[Plan, Live], dict[int, Place]],
        live: Live,
        holder: str,
    ):
        self.where = (store, mirror)
        token = read_token(token_file) if token_file else None
        self._source = open_source(store, token)
        self._mirror: Source | None = open_source(mirror) if mirror else None
        self._live, self._holder, self._leased = live, holder, False
        self._plan, self._plan_hash = read_plan(self._source)
        self._places = places(self._plan, live)
        self.lineage = self._plan.lineage
        # of the version that was staged last
        self._digests: tuple[int | None, dict[int, bytes]] = (None, {})
        self._staged = 0  # versions

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

        Every live block is read and compared with the manifest's hash at the first version, at one
        that comes by several edges or in full, and else at one of `verify_every`, each time other
        blocks: a value that went wrong in the live weights is found within that many versions, and
        the newest full version mends it. A damaged or missing edge is left out, a wrong base too,
        until a route works. Raises `TransferError` saying what is there and what was wrong with the
        rest, that it took over `timeout_s` seconds, or is not wanted any more.
        """
        if have == want:
            return Staged(self._live, self._places, lambda block: None, 1)
        end = time.monotonic() + timeout_s
        useless: set[tuple[bool, Step]] = set()  # (of the mirror, edge)
        why: list[str] = []
        staged = None
        try:
            while True:
                route = self._route(have, want, useless, why)
                try:
                    staged = stage(
                        self._live,
                        self._plan,
                        self._places,
                        route,
                        have is not None and route[0].base is not None,
                        threads,
                        dense_bytes,
                        self._ticker(route, want, end, timeout_s, wanted),
                        device_bytes,
                        self._compared(have, verify_every),
                    )
                    self._staged += 1
                    self._digests = want, staged.digests
                    staged.route = [edge.name for edge in route]
                    staged.mirrored = sum(isinstance(edge, MirroredEdge) for edge in route)
                    return staged
                except WrongBase as error:
                    have = None
                    why.append(str(error))
                except (Corrupted, Missing) as error:
                    useless.add(
                        (
                            isinstance(error.edge, MirroredEdge),
                            (error.edge.version, error.edge.base),
                        )
                    )
                    why.append(str(error))
        finally:
            # until the next version, or the lease's end
            self._leased = staged is not None and staged.rereads
            if not self._leased:
                self._give_back()

    def _compared(self, have: int | None, verify_every: int) -> Callable[[int], bytes | None]:
        """See `rose.transfer.stage.stage`: what was said of `have`'s blocks when it was staged
        here, but for those whose turn it is to be compared again."""
        version, digests = self._digests
        if have is None or version != have:
            return lambda block: None
        turn = self._staged % verify_every
        return lambda block: None if block % verify_every == turn else digests.get(block)

    def _give_back(self) -> None:
        with suppress(TransferError):  # it ends by itself
            self._source.hold(self._holder, [], 0)

    def close(self) -> None:
        if self._leased:
            self._give_back()
        self._source.close()
        if self._mirror is not None:
            self._mirror.close()

    def _route(self, have: int | None, want: int, useless: set, why: list[str]) -> list[Edge]:
        """Opened. The step from the version before is taken without looking at what else there
        is."""
        opened: dict[Step, Edge] = {}
        if have is not None and (edge := self._open((want, have), useless, why)) is not None:
            return [edge]
        edges = {step for step in present(self._source) if (False, step) not in useless}
        while True:
            route = choose(
                edges, have, want, lambda step: self._nbytes(step, opened, useless, why), why
            )
            for step in route:
                if opened.get(step) is None:
                    edges.discard(step)
                    break
            else:
                return [opened[step] for step in route]

    def _nbytes(self, step: Step, opened: dict, useless: set, why: list[str]) -> int:
        if step not in opened:
            opened[step] = self._open(step, useless, why)
        # one that is not there is found out next
        return 0 if opened[step] is None else opened[step].nbytes

    def _open(self, step: Step, useless: set, why: list[str]) -> Edge | None:
        if self._mirror is not None and (True, step) not in useless:
            try:
                return MirroredEdge(self._mirror, *step, self._plan)
            except Missing:
                pass  # not sent to this node, or dropped
        if (False, step) in useless:
            return None
        try:
            return StoredEdge(self._source, *step, self._plan, self._plan_hash)
        except Missing:
            useless.add((False, step))
        except Corrupted as error:
            useless.add((False, step))
            why.append(str(error))
        return None

    def _ticker(
        self, route: list[Edge], want: int, end: float, timeout_s: float, wanted: Callable[[], bool]
    ) -> Callable[[], None]:
        held = [edge.name for edge in route if isinstance(edge, StoredEdge)]
        renewed = 0.0

        def tick() -> None:
            nonlocal renewed
            now = time.monotonic()
            if not wanted():
                raise TransferError(f"version {want} is not wanted any more")
            if now > end:
                raise TransferError(
                    f"version {want} was not staged within {timeout_s:g} s, by "
                    + ", ".join(edge_name(edge.version, edge.base) for edge in route)
                )
            if held and now - renewed > RENEW_S:
                renewed = now
                self._source.hold(self._holder, held, LEASE_S)

        tick()
        return tick


def materialise(store: str | Path, version: int) -> dict[str, torch.Tensor]:
    """All tensors of a version of a store, whole, in host memory: for tools and tests. Raises
    `TransferError`."""
    source = open_source(store)
    plan, _ = read_plan(source)
    source.close()
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    tensors = {t.name: torch.zeros(t.shape, dtype=dtypes[t.dtype]) for t in plan.tensors}
    live = Live(tensors)
    receiver = Receiver(str(store), None, None, whole, live, f"tool-{os.getpid()}")
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
