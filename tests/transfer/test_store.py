"""An edge is either committed, whole and verified, or it doesn't exist; and the collector leaves
what is needed."""

import errno
import functools
import resource
import shutil
import signal
import threading

import h5py
import numpy as np
import pytest
import xxhash

from rose.transfer import Corrupted, Missing, TransferError, codec, publish
from rose.transfer.blocks import Tensor, cut
from rose.transfer.edge import Edge, list_edges, read_plan
from rose.transfer.live import Live
from rose.transfer.publish import Publisher, collect
from rose.transfer.receive import Receiver, materialise, whole
from rose.transfer.source import Folder
from rose.transfer.store import (
    FORMAT,
    FULL,
    INITIAL,
    MANIFEST,
    PLAN,
    EdgeWriter,
    Manifest,
    Plan,
    commit,
    create,
    edge_name,
    parse_edge,
    seal,
    unseal,
    write_file,
)
from tests.transfer.worlds import History, Peer, World, same

TENSORS = [Tensor("w", (40, 5), "bfloat16"), Tensor("norm", (12,), "float32")]


def plan_of(world: int = 2, lineage: str = "here") -> Plan:
    return Plan(FORMAT, lineage, world, TENSORS, cut(TENSORS, {}, None, world, 60))


def write(store, plan, version=0, base=FULL, ranks=None):
    """The files of `ranks` (all); patterns count upwards."""
    for rank in range(plan.world) if ranks is None else ranks:
        writer = EdgeWriter(store, plan, version, base, rank)
        for number, block in enumerate(plan.blocks):
            if block.owner == rank:
                values = np.arange(block.stop - block.start, dtype=plan.width(number)) + version
                writer.add(number, codec.encode(values, None), b"", xxhash.xxh3_128_digest(values))
        writer.finish()


@pytest.fixture
def plan():
    return plan_of()


@pytest.fixture
def store(tmp_path, plan):
    create(tmp_path / "store", plan)
    return tmp_path / "store"


def opened(store, version=0, base=FULL) -> Edge:
    return Edge(Folder(store), version, base, *read_plan(Folder(store)))


OTHERS = "000012/full v12a/full v000012/rest v/full v000012/000011 v000012/from-x leases/a.json"


def test_an_edge_and_the_name_of_its_folder_are_one_to_one():
    names = "v000012/from-000011 v000012/full v000000/from-initial v1234567/from-000003".split()
    steps = [(12, 11), (12, FULL), (0, INITIAL), (1234567, 3)]
    assert [edge_name(*step) for step in steps] == names
    assert [parse_edge(*name.split("/")) for name in names] == steps
    assert {parse_edge(*name.split("/")) for name in OTHERS.split()} == {None}


def test_what_is_sealed_is_read_again_and_any_damage_is_named(plan):
    data = seal(plan)
    assert unseal(data, Plan, "here") == plan
    for at in range(len(data)):
        with pytest.raises(Corrupted, match="here: its last line is not the hash of its first"):
            unseal(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], Plan, "here")
        with pytest.raises(Corrupted, match="here"):
            unseal(data[:at], Plan, "here")
    with pytest.raises(Corrupted, match="here"):
        unseal(data + b"\n", Plan, "here")


def test_another_format_and_another_kind_of_file_are_refused_by_name(plan):
    old = Plan(FORMAT - 1, plan.lineage, plan.world, plan.tensors, plan.blocks)
    words = f"plan.json: format {FORMAT - 1}, this program reads {FORMAT}"
    with pytest.raises(Corrupted, match=words):
        unseal(seal(old), Plan, "plan.json")
    with pytest.raises(Corrupted, match="manifest.json: .*plan"):
        unseal(seal(plan), Manifest, "manifest.json")


def test_the_plan_of_a_store_that_is_none_is_missing_by_name(tmp_path):
    with pytest.raises(Missing, match=f"{tmp_path}/nothing/plan.json"):
        read_plan(Folder(tmp_path / "nothing"))


def test_an_edge_without_manifest_does_not_exist(store, plan):
    write(store, plan)
    with pytest.raises(Missing, match="v000000/full/manifest.json"):
        opened(store)
    commit(store, plan, 0, FULL)
    edge = opened(store)
    tables = [edge.table(rank) for rank in range(2)]
    assert [table["block"].tolist() for table in tables] == [plan.owned(0), plan.owned(1)]
    assert edge.nbytes == sum(int(table["length"].sum()) for table in tables)


def test_commit_waits_for_the_slowest_rank(store, plan):
    write(store, plan, ranks=[0])
    late = threading.Timer(0.3, lambda: write(store, plan, ranks=[1]))
    late.start()
    commit(store, plan, 0, FULL, timeout_s=120)
    late.join()
    assert len(opened(store).files) == 2


def test_commit_says_which_file_it_waited_for(store, plan):
    write(store, plan, ranks=[0])
    with pytest.raises(TransferError, match=r"v000000/full/rank-00001.h5: trainer rank 1 did not"):
        commit(store, plan, 0, FULL, timeout_s=0.1)
    assert not (store / "v000000/full" / MANIFEST).exists()


@pytest.mark.parametrize(
    "step, lineage", [((1, FULL), "here"), ((1, 0), "here"), ((0, FULL), "no")]
)
def test_a_file_of_another_edge_or_lineage_is_not_committed(store, plan, step, lineage):
    write(store.parent / "elsewhere", plan_of(lineage=lineage), *step)
    shutil.copytree(store.parent / "elsewhere" / edge_name(*step), store / "v000000/full")
    with pytest.raises(TransferError, match=r"rank-00000.h5: is \{.*\}, expected \{"):
        commit(store, plan, 0, FULL)
    assert not (store / "v000000/full" / MANIFEST).exists()


def test_a_file_is_plain_hdf5_that_other_tools_read_or_is_not_committed(store, plan):
    write(store, plan)
    path = store / "v000000/full/rank-00001.h5"
    with h5py.File(path) as file:
        assert (file.attrs["version"], file.attrs["base"], file.attrs["rank"]) == (0, "", 1)
        assert file["data"].size == file["blocks"]["length"].sum() > 0
    path.write_bytes(b"not HDF5")
    with pytest.raises(TransferError, match="v000000/full/rank-00001.h5: unreadable"):
        commit(store, plan, 0, FULL)


def test_a_rank_with_nothing_to_write_has_an_empty_file(tmp_path):
    plan, store = plan_of(world=9), tmp_path / "store"
    create(store, plan)
    assert len(plan.blocks) < 9
    write(store, plan)
    commit(store, plan, 0, FULL)
    assert len(opened(store).table(8)) == 0


def test_a_manifest_of_another_edge_lineage_or_plan_is_named_with_both(store, plan):
    write(store, plan)
    commit(store, plan, 0, FULL)
    shutil.copytree(store / "v000000/full", store / "v000001/full")
    found = r"v000001/full/manifest.json: \(lineage, plan, version, base\) is \('here', "
    found += r"'[0-9a-f]{32}', 0, None\), expected \('here', '[0-9a-f]{32}', 1, None\)"
    with pytest.raises(Corrupted, match=found):
        opened(store, 1)
    write_file(store / PLAN, seal(plan_of(lineage="other")))
    with pytest.raises(Corrupted, match=r"expected \('other'"):
        opened(store)


def test_trainer_ranks_that_would_cut_the_model_in_different_ways_are_told(tmp_path):
    world = World(tmp_path / "store")
    other = World(tmp_path / "other", largest=50)

    def make(rank):
        plan, peer = (world, other)[rank].plan, Peer(world, rank)
        read = functools.partial(world.read, rank=rank)
        return Publisher(tmp_path / "third", plan, peer, read, 1, 8, 2, 1.0)

    with pytest.raises(TransferError, match="third: trainer rank 1 would cut the model in another"):
        world.together(make)


def test_a_store_whose_removal_was_interrupted_is_no_store(store, plan, monkeypatch):
    def killed(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        create(store, plan)
    with pytest.raises(Missing, match="plan.json"):
        read_plan(Folder(store))


def test_a_full_disk_leaves_no_file_and_the_process_lives(store, plan):
    """The kernel lets files grow to 100 bytes only."""
    write(store, plan)
    signal_before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(TransferError, match=r"v000000/full/manifest.json: not written"):
            commit(store, plan, 0, FULL)
        with pytest.raises(TransferError, match="v000001/full/rank-00000.h5: not written: .*large"):
            write(store, plan, 1)
        with pytest.raises(TransferError, match=r"other/plan.json: not written"):
            create(store.parent / "other", plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signal_before)
    left = [path.name for path in sorted(store.glob("v*/*/*"))]
    assert left == ["rank-00000.h5", "rank-00001.h5"]


def names(store) -> list[str]:
    """Of the edges that are committed."""
    found = [edge_name(*step) for step in list_edges(Folder(store))]
    return sorted(name for name in found if (store / name / MANIFEST).exists())


def raises(error):
    def broken(*args):
        raise error

    return broken


def full_due(store, keep=100) -> History:
    """Version 2 is published, of which a full version and an edge from the model's folder are
    due."""
    history = History(store, 2, full_every=2, keep=keep)
    history.world.step()
    history.world.together(lambda rank: history.world.publishers[rank].publish(2))
    return history


@pytest.mark.parametrize("trouble", ["damaged file", "no payload", "disk that can't be listed"])
def test_what_tidying_cannot_read_is_left_out(tmp_path, monkeypatch, capfd, trouble):
    history = full_due(tmp_path / "store", keep=2)
    world = history.world
    with monkeypatch.context() as patch:
        if trouble == "damaged file":
            path = world.store / edge_name(1, 0) / "rank-00001.h5"
            path.write_bytes(bytes(byte ^ 4 for byte in path.read_bytes()))
        elif trouble == "no payload":
            patch.setattr(codec, "compose", raises(ValueError("not a payload")))
        else:
            patch.setattr(publish, "collect", raises(OSError(errno.ESTALE, "Stale file handle")))
        assert world.tidy() == []
    assert "store upkeep failed" in capfd.readouterr().out
    assert edge_name(2, FULL) in names(world.store)
    assert (edge_name(2, INITIAL) in names(world.store)) == (trouble == "disk that can't be listed")
    for version in (3, 4):
        world.step()
        world.publish(version)
        world.tidy()
    assert same(materialise(world.store, 4), world.weights)
    live = history.live(INITIAL)
    receiver = Receiver(str(world.store), None, None, whole, Live(live))
    staged = receiver.stage(INITIAL, 4, 1, 1 << 30, 30.0)
    staged.flip()
    assert same(live, world.weights)  # a joiner comes to it, too, if by the full version
    if trouble == "no payload":  # which is a moment's: the next version has its edge
        assert {edge_name(3, INITIAL), edge_name(4, INITIAL)} <= set(names(world.store))
        assert edge_name(3, FULL) not in names(world.store)
        assert staged.route == [edge_name(4, INITIAL)]


@pytest.mark.parametrize("step", ["a rank's file", "every file", "manifest"])
def test_a_full_version_without_room_leaves_nothing_and_comes_with_the_next(
    tmp_path, monkeypatch, capfd, step
):
    world = full_due(tmp_path / "store").world
    finish, full = EdgeWriter.finish, TransferError("not written: No space left on device")

    def refuse(self) -> None:
        if step == "every file" or self.path.name == "rank-00000.h5":
            raise full
        finish(self)

    with monkeypatch.context() as patch:
        if step == "manifest":
            patch.setattr(publish, "commit", raises(full))
        else:
            patch.setattr(EdgeWriter, "finish", refuse)
        world.tidy()
    assert "store upkeep failed" in (said := capfd.readouterr().out) and "not written" in said
    assert [path.name for path in (world.store / "v000002").iterdir()] == ["from-000001"]
    world.step()
    world.publish(3)
    assert {edge_name(3, FULL), edge_name(3, INITIAL)} <= set(names(world.store))


def test_every_version_that_is_kept_can_be_reached_after_the_collector(tmp_path):
    assert collect(tmp_path, 2) == [], "of an empty store"
    history = History(tmp_path / "store", 11, full_every=4, keep=2)
    world = history.world
    assert names(world.store)[0] == "v000008/from-initial" and "v000008/full" in names(world.store)
    for version in (8, 9, 10):
        assert same(materialise(world.store, version), history.weights[version])
    assert not list(world.store.glob("v000007*")) and collect(world.store, 2) == []
    with pytest.raises(ValueError, match="version 1 after 10: versions grow"):
        world.publish(1)


def test_the_newest_full_version_that_leads_to_all_kept_ones_is_kept_and_all_after_it(tmp_path):
    world = History(tmp_path / "store", 6, tidy=False, full_every=4, keep=3).world
    # version 3 is kept, and only the full version 0 leads to it
    assert collect(world.store, 3) == []
    assert collect(world.store, 2) == [(0, INITIAL), (0, FULL), (1, 0), (2, 1), (3, 2)]
    left = [(4, 3), (4, INITIAL), (4, FULL), (5, 4)]
    assert names(world.store) == [edge_name(*step) for step in left]


def test_edges_without_manifest_are_not_counted_as_versions_and_go_with_the_old_ones(tmp_path):
    world = History(tmp_path / "store", 3, tidy=False, full_every=1).world
    (world.store / edge_name(9, 8)).mkdir(parents=True)  # being written
    (world.store / edge_name(1, FULL) / MANIFEST).unlink()  # was never committed
    assert set(collect(world.store, 1)) == {(0, INITIAL), (0, FULL), (1, INITIAL), (1, 0)}
    assert set(names(world.store)) == {edge_name(2, base) for base in (FULL, INITIAL, 1)}
    assert not (world.store / edge_name(1, FULL)).exists()


def test_files_go_a_call_after_their_manifest_so_that_who_reads_them_can_end(tmp_path):
    world = History(tmp_path / "store", 3, tidy=False, full_every=1).world
    source = Folder(world.store)
    edge = opened(world.store, 1, 0)
    assert (1, 0) in collect(world.store, 1)
    with pytest.raises(Missing):
        opened(world.store, 1, 0)
    with pytest.raises(Missing, match="v000001/from-000000/manifest.json"):
        edge.require()
    assert len(edge.table(0)) and {version for version, _ in list_edges(source)} == {0, 1, 2}
    assert collect(world.store, 1) == []
    assert {version for version, _ in list_edges(source)} == {2}
