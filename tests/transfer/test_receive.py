"""A reader comes to the version that it wants by whatever way is left, exactly, or says what is
missing."""

import copy
import json
import os
import shutil

import pytest
import torch

from rose.transfer import TransferError
from rose.transfer.live import Live
from rose.transfer.receive import Receiver, whole
from rose.transfer.source import Folder
from rose.transfer.store import FULL, INITIAL, MANIFEST, edge_name
from tests.parts.relay.relays import TOKEN, Running
from tests.transfer.worlds import History, same

ALL = 1 << 30


class Reader:
    def __init__(self, history: History, have=None, mirror=None, where=None, token_file=None):
        self.live, self.have = history.live(have), have
        self.receiver = Receiver(
            str(where or history.store), mirror and str(mirror), token_file, whole, Live(self.live)
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


def table_of(edge) -> int:
    """Where in rank 0's file the table of this edge's folder lies."""
    return json.loads((edge / MANIFEST).read_text().partition("\n")[0])["files"][0]["table_offset"]


EIGHT = {"versions": 8, "full_every": 4, "keep": 100}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return History(tmp_path_factory.mktemp("eight") / "store", **EIGHT)


@pytest.fixture
def eight(published, tmp_path):
    """Versions 0 to 7 with full ones at 0 and 4, in a store of the test's own."""
    own = copy.copy(published)
    own.world, own.store = None, tmp_path / "store"
    shutil.copytree(published.store, own.store)
    return own


FULL_4, INITIAL_4 = "v000004/full", "v000004/from-initial"


def deltas(*versions: int) -> list[str]:
    return [edge_name(version, version - 1) for version in versions]


def test_the_way_with_the_least_to_read_is_taken_from_wherever_the_reader_is(eight):
    for have, want, route in (
        (6, 7, deltas(7)),
        (2, 4, deltas(3, 4)),
        (3, 6, deltas(4, 5, 6)),
        (INITIAL, 0, ["v000000/from-initial"]),
        (INITIAL, 4, [INITIAL_4]),
        (INITIAL, 6, [INITIAL_4, *deltas(5, 6)]),
        (None, 4, [FULL_4]),
        (None, 7, [FULL_4, *deltas(5, 6, 7)]),
        (None, 2, ["v000000/full", *deltas(1, 2)]),
        (7, 5, [FULL_4, *deltas(5)]),
    ):
        reader = Reader(eight, have)
        assert reader.load(want) == route
        assert same(reader.live, eight.weights[want])


def test_far_behind_the_full_version_is_read_where_the_differences_since_outweigh_it(tmp_path):
    history = History(tmp_path / "store", 0, full_every=100)
    for version in range(5):
        history.world.step(0.9)
        history.world.publish(version)
    fulls = [v for v in range(5) if (history.store / edge_name(v, FULL)).exists()]
    assert fulls[-1] > 1
    history.weights[4] = dict(history.world.weights)
    reader = Reader(history, INITIAL)
    reader.load(0)
    assert reader.load(4)[0] == edge_name(fulls[-1], FULL) and same(reader.live, history.weights[4])


def frozen(history: History, versions: range, name: str) -> None:
    """Publish more versions, in which this tensor stays as it is."""
    before = history.weights[versions[0] - 1][name]
    for version in versions:
        history.world.step(0.1)
        history.world.weights[name] = before
        history.world.publish(version)
        history.weights[version] = dict(history.world.weights)


def test_some_blocks_are_hashed_before_and_after_a_flip_and_the_others_not_read(
    tmp_path, monkeypatch
):
    history = History(tmp_path / "store", 2)
    frozen(history, range(2, 7), "embed")
    reader, hashed = Reader(history, 0), []
    live = reader.receiver._live
    view = live.view
    monkeypatch.setattr(live, "view", lambda place: hashed.append(str(place)) or view(place))
    every, before = len(history.world.plan.blocks), []
    for version in range(1, 6):
        hashed.clear()
        staged = reader.stage(version, verify_every=4)
        before.append(set(hashed))
        staged.flip()
        hashed.clear()
        staged.check()
        assert before[-1] >= set(hashed) and any("layer.weight" in place for place in hashed)
        assert version == 1 or not any("embed" in place for place in hashed)
        reader.have = version
        assert staged.route == deltas(version)
        assert same(reader.live, history.weights[version])
    assert len(before.pop(0)) == every  # at first all
    # then all in four versions
    assert len(set.union(*before)) == every and max(map(len, before)) < every / 2


@pytest.mark.parametrize("name", ["embed", "layer.weight"])
def test_a_value_that_went_wrong_is_found_and_mended_by_a_full_version(tmp_path, name):
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
        if routes[0][0].endswith("full"):
            assert not [route for route in routes[1:] if route[0].endswith("full")]


def test_a_version_that_was_staged_and_not_put_in_place_is_no_base_that_is_trusted(tmp_path):
    history = History(tmp_path / "store", 3, full_every=1)
    reader = Reader(history, 0)
    reader.load(1, verify_every=100)
    reader.stage(2, verify_every=100).release()
    reader.live["norm"].view(torch.int16)[3] ^= 1
    assert reader.load(2, verify_every=100)[0].endswith("full")
    assert same(reader.live, history.weights[2])


def test_what_was_wrong_with_the_live_weights_is_told_when_there_is_no_full_version(tmp_path):
    history = History(tmp_path / "store", 2)
    shutil.rmtree(history.store / "v000000/full")
    reader = Reader(history, 0)
    reader.live["norm"] += 1
    why = "v000001/from-000000 builds on other weights than the live ones"
    with pytest.raises(TransferError, match=rf"can't be .*; {why}: block \d+ of norm has xxh3-128"):
        reader.stage(1)


def mirrored(history: History, folder, step):
    """The copy of an edge as a broadcast leaves it."""
    target = folder / edge_name(*step)
    shutil.copytree(history.store / edge_name(*step), target)
    (target / MANIFEST).unlink()
    return target


def test_what_this_node_was_sent_is_read_there(eight, tmp_path):
    mirrored(eight, tmp_path / "mirror", (7, 6))
    for path in (eight.store / "v000007/from-000006").glob("rank-*.h5"):
        path.unlink()
    reader = Reader(eight, 6, tmp_path / "mirror")
    staged = reader.stage(7)
    assert staged.route == deltas(7) and staged.mirrored == 1
    staged.flip()
    assert same(reader.live, eight.weights[7])


@pytest.mark.parametrize("damage", ["flipped", "empty", "short", "no file", "other lineage"])
def test_a_damaged_copy_of_the_node_is_read_from_the_store_instead(eight, tmp_path, damage):
    other = History(tmp_path / "other", 8) if damage == "other lineage" else eight
    edge = mirrored(other, tmp_path / "mirror", (7, 6))
    if damage == "flipped":
        flip_byte(edge / "rank-00001.h5")
    elif damage == "no file":
        (edge / "rank-00000.h5").unlink()
    elif damage != "other lineage":
        os.truncate(edge / "rank-00001.h5", {"empty": 0, "short": 700}[damage])
    reader = Reader(eight, 6, tmp_path / "mirror")
    assert reader.load(7) == deltas(7) and same(reader.live, eight.weights[7])


def test_when_copy_and_store_are_damaged_the_store_is_named(eight, tmp_path):
    edge = eight.store / "v000007/from-000006"
    for folder in (edge, mirrored(eight, tmp_path / "mirror", (7, 6))):
        flip_byte(folder / "rank-00000.h5", table_of(edge))
    with pytest.raises(TransferError, match=f"{edge}/rank-00000.h5: its table is damaged"):
        Reader(eight, 6, tmp_path / "mirror").stage(7)


def remove_meanwhile(monkeypatch, reader, *edges: list):
    """At each reading of the live weights the next of these lists of folders goes."""
    left, read = list(edges), reader.receiver._live.read

    def removed_meanwhile(place):
        for folder in left.pop(0) if left else ():
            shutil.rmtree(folder)
        return read(place)

    monkeypatch.setattr(reader.receiver._live, "read", removed_meanwhile)
    return left


def test_an_edge_that_is_removed_while_it_is_read_is_left_out(tmp_path, monkeypatch):
    eight = History(tmp_path / "store", **EIGHT)
    reader, store = Reader(eight, INITIAL), eight.store
    remove_meanwhile(monkeypatch, reader, [store / INITIAL_4, store / "v000005"], [store / FULL_4])
    with pytest.raises(TransferError, match="v000004/from-initial/rank-00001.h5: No such file"):
        reader.load(7)  # no way is left
    assert same(reader.live, eight.weights[INITIAL])
    eight.publish(8)
    assert reader.load(8) == ["v000008/full"] and same(reader.live, eight.weights[8])


def test_a_version_whose_edges_are_removed_is_reached_by_the_last_way(eight, monkeypatch):
    reader, store = Reader(eight, INITIAL), eight.store
    left = remove_meanwhile(monkeypatch, reader, [store / INITIAL_4], [store / FULL_4])
    assert reader.load(4) == ["v000000/from-initial", *deltas(1, 2, 3, 4)] and not left
    assert same(reader.live, eight.weights[4])


def test_a_flip_whose_payloads_were_removed_is_taken_back_before_a_value_is_written(tmp_path):
    history = History(tmp_path / "store", 2, full_every=1, keep=1)
    reader = Reader(history)
    staged = reader.stage(1, dense_bytes=0)
    before = {name: tensor.clone() for name, tensor in reader.live.items()}
    for version in (2, 3):
        history.publish(version)
    with pytest.raises(TransferError, match="the flip failed, and was undone: .*No such file"):
        staged.flip()
    assert same(reader.live, before)
    reader.load(3)
    assert same(reader.live, history.weights[3])


def test_a_relay_is_as_good_as_the_folder(eight, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    file = eight.store / "v000004/from-000003/rank-00001.h5"
    os.truncate(file, file.stat().st_size // 2)
    relay = Running(Folder(eight.store), tmp_path / "cache")
    try:
        reader = Reader(eight, 3, where=relay.url, token_file=str(token))
        assert reader.load(4) == ["v000004/full"] and same(reader.live, eight.weights[4])
        reader.receiver.close()
    finally:
        relay.stop()


def test_a_reader_says_what_it_was_reading_when_it_took_too_long_or_nobody_wants_it_any_more(eight):
    asked = iter([True, True])
    with pytest.raises(TransferError, match="version 4 was not staged within 0 s, by"):
        Reader(eight, 2).receiver.stage(2, 4, 1, ALL, 0.0)
    with pytest.raises(TransferError, match="version 4 is not wanted any more"):
        Reader(eight, 2).receiver.stage(2, 4, 1, ALL, 30.0, wanted=lambda: next(asked, False))
