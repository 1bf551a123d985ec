"""A reader comes to the version that it wants by whatever way is left, exactly, or says what is
missing."""

import os
import shutil
import time

import pytest
import torch
from relays import TOKEN, Running

from rose.transfer import TransferError
from rose.transfer.edge import COMPLETE, StoredEdge, pack_table, read_plan
from rose.transfer.publish import collect
from rose.transfer.receive import LEASE_S, Receiver, materialise, whole
from rose.transfer.source import Folder, held_until, leases
from rose.transfer.stage import Live
from rose.transfer.store import FULL, INITIAL, MANIFEST, edge_name
from tests.transfer.worlds import World, same

ALL = 1 << 30


class History:
    """A world, and the weights of each version that it has published."""

    def __init__(self, store, versions: int, **options):
        self.world = World(store, **options)
        self.store, self.weights = self.world.store, {INITIAL: dict(self.world.weights)}
        for version in range(versions):
            self.publish(version)

    def publish(self, version: int, tidy: bool = True):
        self.world.step(0.1)
        self.world.publish(version)
        self.weights[version] = dict(self.world.weights)
        if tidy:
            self.world.tidy()

    def live(self, version):
        return {
            name: torch.zeros_like(t) if version is None else t.clone()
            for name, t in self.weights[INITIAL if version is None else version].items()
        }


class Reader:
    def __init__(self, history: History, have=None, mirror=None, where=None, token_file=None):
        self.live, self.have = history.live(have), have
        self.receiver = Receiver(
            str(where or history.store),
            mirror and str(mirror),
            token_file,
            whole,
            Live(self.live),
            "reader",
        )

    def stage(self, want, dense_bytes=ALL, verify_every=1):
        return self.receiver.stage(self.have, want, 1, dense_bytes, 30.0, verify_every=verify_every)

    def load(self, want, verify_every=1) -> list[str]:
        staged = self.stage(want, verify_every=verify_every)
        staged.flip()
        staged.check()
        self.have = want
        return staged.route


def flip_byte(path, at: int = -1):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.fixture
def eight(tmp_path):
    """Versions 0 to 7 with full ones at 0 and 4, squashed."""
    return History(tmp_path / "store", 8, full_every=4, keep=100)


def test_the_shortest_way_is_taken_from_wherever_the_reader_is(eight):
    for have, want, route in (
        (6, 7, ["v000007/from-000006"]),
        (2, 4, ["v000004/from-000002"]),
        (INITIAL, 0, ["v000000/from-initial"]),
        (None, 4, ["v000004/full"]),
        (INITIAL, 4, ["v000004/from-initial"]),
    ):
        reader = Reader(eight, have)
        assert reader.load(want) == route
        assert same(reader.live, eight.weights[want])


def test_a_reader_goes_on_from_version_to_version_and_back(eight):
    reader = Reader(eight, INITIAL)
    for want in (0, 1, 3, 7, 7, 2, 6):
        reader.load(want)
        assert same(reader.live, eight.weights[want])


def test_each_way_that_fails_is_left_out_until_one_works_and_the_reasons_are_told_in_the_end(eight):
    damaged = []
    for route in (
        ["v000004/from-000002"],
        ["v000003/from-000002", "v000004/from-000003"],
        ["v000004/full"],
        ["v000000/full", "v000004/from-000000"],
    ):
        reader = Reader(eight, 2)
        assert reader.load(4) == route and same(reader.live, eight.weights[4])
        damaged.append(eight.store / route[-1] / "rank-00001.h5")
        flip_byte(damaged[-1], 9)
    with pytest.raises(
        TransferError, match="version 4 can't be reached from version 2: the store has .*"
    ) as error:
        Reader(eight, 2).stage(4)
    assert all(f"{path}: its HDF5 structure is damaged" in str(error.value) for path in damaged)


@pytest.mark.parametrize(
    "damage, why",
    [
        (lambda edge: flip_byte(edge / MANIFEST, 10), "manifest.json: its last line"),
        (
            lambda edge: flip_byte(edge / "rank-00000.h5", 100),
            "rank-00000.h5: its HDF5 structure is damaged",
        ),
        (
            lambda edge: (edge / "rank-00001.h5").write_bytes(
                (edge / "rank-00001.h5").read_bytes()[:-9]
            ),
            "rank-00001.h5",
        ),
        (lambda edge: (edge / "rank-00001.h5").write_bytes(b""), "rank-00001.h5"),
        (lambda edge: (edge / "rank-00001.h5").unlink(), "rank-00001.h5: No such file"),
        (lambda edge: shutil.rmtree(edge), None),
    ],
    ids=["manifest", "structure", "cut", "empty", "file gone", "edge gone"],
)
def test_a_damaged_edge_is_gone_around_if_there_is_another_way_and_named_if_not(eight, damage, why):
    for have, base in ((2, 2), (3, 3), (INITIAL, INITIAL), (None, FULL)):
        damage(eight.store / edge_name(4, base))
        reader = Reader(eight, have)
        if base is not FULL:
            route = reader.load(4)
            assert edge_name(4, base) not in route and same(reader.live, eight.weights[4])
    with pytest.raises(
        TransferError,
        match="version 4 can't be reached from nothing that can be built on: the store "
        "has v000000/from-initial",
    ) as error:
        shutil.rmtree(eight.store / edge_name(4, 0), ignore_errors=True)
        reader.load(4)
    assert why is None or why in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embed", "layer.weight", "layer.bias", "norm"])
@pytest.mark.parametrize("have", [INITIAL, 6])
def test_one_wrong_value_in_the_live_weights_is_noticed_even_in_a_block_that_does_not_change(
    tmp_path, name, have
):
    history = History(tmp_path / "store", 7)
    before = history.weights[6][name]
    history.world.step(0.1)
    history.world.weights[name] = before  # this tensor stays as it is
    history.world.publish(7)
    reader = Reader(history, have)
    reader.live[name].view(-1).view(torch.int16)[5] ^= 1
    route = reader.load(7)
    assert same(reader.live, dict(history.world.weights)) and route[0].endswith("full")


def frozen(history: History, versions: range, name: str) -> None:
    """Publish more versions, in which this tensor stays as it is."""
    before = history.weights[versions[0] - 1][name]
    for version in versions:
        history.world.step(0.1)
        history.world.weights[name] = before
        history.world.publish(version)
        history.weights[version] = dict(history.world.weights)


def test_of_a_version_after_another_only_what_changes_is_read_and_some_blocks_are_compared(
    tmp_path, monkeypatch
):
    history = History(tmp_path / "store", 2)
    frozen(history, range(2, 7), "embed")
    reader, whole_blocks, values = Reader(history, 0), set(), []
    live = reader.receiver._live
    read, read_at = live.read, live.read_at
    monkeypatch.setattr(live, "read", lambda place: whole_blocks.add(str(place)) or read(place))
    monkeypatch.setattr(
        live,
        "read_at",
        lambda place, positions, most: (
            values.append(place.parameter) or read_at(place, positions, most)
        ),
    )
    every, compared = len(history.world.plan.blocks), []
    for version in range(1, 6):
        whole_blocks.clear()
        staged = reader.stage(version, verify_every=4)
        compared.append(set(whole_blocks))
        assert values or version == 1
        staged.flip()
        staged.check()
        reader.have = version
        assert staged.route == [f"v{version:06d}/from-{version - 1:06d}"] and same(
            reader.live, history.weights[version]
        )
    assert len(compared.pop(0)) == every  # at first all
    # then all in four versions
    assert len(set.union(*compared)) == every and max(map(len, compared)) < every / 2
    assert "embed" not in values and {"layer.weight"} <= set(values)


@pytest.mark.parametrize("name", ["embed", "layer.weight"])
def test_a_value_that_went_wrong_is_found_within_that_many_versions_and_mended_by_a_full_one(
    tmp_path, name
):
    history = History(tmp_path / "store", 2, full_every=1)
    frozen(history, range(2, 8), "embed")
    for at in (0, 5, 250):
        reader = Reader(history, 0)
        reader.load(1, verify_every=4)
        values = reader.live[name].view(-1).view(torch.int16)
        values[at] ^= 1
        routes = [reader.load(version, verify_every=4) for version in range(2, 6)]
        assert [route for route in routes if route[0].endswith("full")]
        assert same(reader.live, history.weights[5])
        assert not [
            route
            for route in routes[1:]
            if routes[0][0].endswith("full") and route[0].endswith("full")
        ]


def test_a_version_that_was_staged_and_not_put_in_place_is_no_base_that_is_trusted(tmp_path):
    history = History(tmp_path / "store", 3, full_every=1)
    reader = Reader(history, 0)
    reader.load(1, verify_every=100)
    reader.stage(2, verify_every=100).release()
    reader.live["norm"].view(torch.int16)[3] ^= 1
    assert reader.load(2, verify_every=100)[0].endswith("full") and same(
        reader.live, history.weights[2]
    )


def test_what_was_wrong_with_the_live_weights_is_told_when_there_is_no_full_version(tmp_path):
    history = History(tmp_path / "store", 2)
    shutil.rmtree(history.store / "v000000/full")
    reader = Reader(history, 0)
    reader.live["norm"] += 1
    with pytest.raises(
        TransferError,
        match=r"can't be reached from nothing.*; v000001/from-000000 builds on other "
        r"weights than the live ones: block \d+ of norm has xxh3-128",
    ):
        reader.stage(1)


def test_a_store_made_anew_by_another_attempt_is_not_taken_for_the_old_one(tmp_path):
    history = History(tmp_path / "store", 2)
    reader = Reader(history, INITIAL)
    reader.load(0)
    History(tmp_path / "store", 2)
    with pytest.raises(
        TransferError,
        match=r"version 1 can't be reached.*v000001/from-000000/manifest.json: \(lineage",
    ):
        reader.stage(1)
    assert same(reader.live, history.weights[0])
    assert Reader(history, INITIAL).load(1)


# --------------------------------------------------------------------------- mirror


def mirrored(history: History, folder, step):
    """The copy of an edge as a broadcast leaves it."""
    source = Folder(history.store)
    plan, digest = read_plan(source)
    edge = StoredEdge(source, *step, plan, digest)
    target = folder / edge.name
    target.mkdir(parents=True)
    for rank, file in enumerate(edge.manifest.files):
        data = (history.store / edge.name / file.file).read_bytes()
        (target / f"rank-{rank:05d}.payload").write_bytes(
            data[file.data_offset : file.data_offset + file.data_size]
        )
        (target / f"rank-{rank:05d}.table").write_bytes(pack_table(edge.table(rank)))
    (target / COMPLETE).touch()
    return target


def test_what_this_node_was_sent_is_read_there_and_needs_no_lease(eight, tmp_path):
    mirrored(eight, tmp_path / "mirror", (7, 6))
    shutil.rmtree(eight.store / "v000007")
    reader = Reader(eight, 6, tmp_path / "mirror")
    assert reader.load(7) == ["v000007/from-000006"] and same(reader.live, eight.weights[7])
    assert not (eight.store / "leases").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda edge: flip_byte(edge / "rank-00001.payload"),
        lambda edge: flip_byte(edge / "rank-00000.table", 7),
        lambda edge: (edge / "rank-00001.payload").write_bytes(b""),
        lambda edge: (edge / "rank-00000.table").unlink(),
        lambda edge: (edge / "rank-00000.table").write_bytes(b"short"),
        lambda edge: (edge / COMPLETE).unlink(),
    ],
    ids=["payload", "table", "no payload", "no table", "short table", "incomplete"],
)
def test_a_damaged_copy_of_the_node_is_read_from_the_store_instead(eight, tmp_path, damage):
    damage(mirrored(eight, tmp_path / "mirror", (7, 6)))
    reader = Reader(eight, 6, tmp_path / "mirror")
    assert reader.load(7) == ["v000007/from-000006"] and same(reader.live, eight.weights[7])


def test_when_copy_and_store_are_damaged_both_are_named(eight, tmp_path):
    flip_byte(mirrored(eight, tmp_path / "mirror", (7, 6)) / "rank-00001.payload")
    flip_byte(eight.store / "v000007/from-000006/rank-00000.h5")
    with pytest.raises(
        TransferError,
        match=f"{tmp_path}/mirror/v000007/from-000006: rank 1's file: the payload of block "
        rf".*{eight.store}/v000007/from-000006/rank-00000.h5",
    ):
        Reader(eight, 6, tmp_path / "mirror").stage(7)


# --------------------------------------------------------------------------- leases, relays, time


def test_a_lease_is_held_while_staging_and_given_back_afterwards(eight, monkeypatch):
    reader, seen = Reader(eight, 3), []
    read = reader.receiver._live.read
    monkeypatch.setattr(
        reader.receiver._live,
        "read",
        lambda place: seen.append(leases(eight.store, time.time())) or read(place),
    )
    reader.stage(6)
    assert seen and all(held == {"v000004/from-000003", "v000006/from-000004"} for held in seen)
    assert not leases(eight.store, time.time())


def test_payloads_that_the_flip_reads_again_stay_leased_until_the_next_version(tmp_path):
    history = History(tmp_path / "store", 2, full_every=1, keep=1)
    reader = Reader(history)
    staged = reader.stage(1, dense_bytes=0)
    assert leases(history.store, time.time()) == {"v000001/full"}
    for version in (2, 3):
        history.publish(version)
    staged.flip()
    staged.check()
    assert same(reader.live, history.weights[1])
    reader.have = 1
    reader.load(3)
    assert not leases(history.store, time.time())
    reader.stage(2 if (history.store / "v000002/full").exists() else 3, dense_bytes=0)
    reader.receiver.close()
    assert not leases(history.store, time.time())


def test_a_relay_is_as_good_as_the_folder_and_a_file_cut_short_behind_it_is_gone_around(
    eight, tmp_path
):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    file = eight.store / "v000004/from-000003/rank-00001.h5"
    file.write_bytes(file.read_bytes()[:-300])
    relay = Running(Folder(eight.store), tmp_path / "cache")
    try:
        reader = Reader(eight, 3, where=relay.url, token_file=str(token))
        assert reader.load(4) == ["v000004/full"] and same(reader.live, eight.weights[4])
        reader.receiver.close()
    finally:
        relay.stop()


def test_a_reader_that_takes_too_long_says_what_it_was_reading(eight):
    with pytest.raises(
        TransferError, match="version 4 was not staged within 0 s, by v000004/from-000002"
    ):
        Reader(eight, 2).receiver.stage(2, 4, 1, ALL, 0.0)


def test_what_nobody_wants_any_more_is_not_staged_to_its_end(eight):
    asked = iter([True, True])
    with pytest.raises(TransferError, match="version 4 is not wanted any more"):
        Reader(eight, 2).receiver.stage(2, 4, 1, ALL, 30.0, wanted=lambda: next(asked, False))


def test_versions_are_read_from_a_store_whose_disk_is_full(eight, disk):
    shutil.copytree(eight.store, disk.path / "store")
    os.sync()
    disk.fill()
    with pytest.raises(OSError, match="No space left"):  # the last few blocks
        for number in range(100):
            (disk.path / f"small-{number}").write_bytes(b"x" * 600)
    reader = Reader(eight, 3, where=disk.path / "store")
    with pytest.warns(UserWarning, match="takes no leases"):
        assert reader.load(4) == ["v000004/from-000003"]
    assert same(reader.live, eight.weights[4])
    reader.receiver.close()


def test_whole_tensors_of_any_version_for_tools(eight):
    for version in (0, 5, 7):
        assert same(materialise(eight.store, version), eight.weights[version])
    with pytest.raises(TransferError, match="version 9 can't be reached"):
        materialise(eight.store, 9)


def test_a_lease_ends_by_itself(eight):
    Folder(eight.store).hold("gone", ["v000000/full"], LEASE_S)
    assert held_until(eight.store, time.time() + LEASE_S + 1) == {}
    assert collect(eight.store, 1)
