"""A run that starts again takes recorded turns for their very contexts, and nothing else."""

import msgspec

from rose import protocol as p
from rose.coordinator.turn_log import TurnLog
from tests import made
from tests.coordinator.conftest import HOST, World, request
from tests.coordinator.conftest import tokens as tokens_of


def result(turn="g0.0.t0", tokens=(7, 8), **more):
    return made.result(turn, tokens, **more)


def opened(folder, step=0, behind=0):
    """By an attempt that ends in order."""
    log = TurnLog(folder, step, behind)
    log.stopped()
    return log


def written(folder, *pairs, version=0, step=0, behind=0):
    log = opened(folder, step, behind)
    for asked, answer in pairs:
        log.add(asked, answer, version)
    log.close()


def test_a_turn_is_found_once_by_its_trajectory_context_and_sampling(tmp_path):
    written(tmp_path, (request(), result()))
    log = opened(tmp_path)
    for other in (request("g0.1.t0"), request(tokens=(1, 2, 4)), request(new=11), request(seed=6)):
        assert log.find(other, 0) is None
    # an agent's concurrent calls may come in another order
    assert log.find(request("g0.0.t4"), 0) == result("g0.0.t4")
    assert log.find(request(), 0) is None
    assert (log.resumed_turns, log.resumed_tokens) == (1, 2)


def test_the_same_context_asked_twice_has_two_answers_in_their_order(tmp_path):
    written(tmp_path, (request(), result()), (request("g0.0.t1"), result(tokens=(9,))))
    log = opened(tmp_path)
    assert log.find(request(), 0) == result()
    assert log.find(request("g0.0.t1"), 0) == result("g0.0.t1", tokens=(9,))


def test_of_turns_that_were_cut_the_longest_counts_and_none_beside_a_complete_one(tmp_path):
    cut = p.FinishReason.ABORT
    for tokens in ((7,), (7, 8), (7, 8, 9)):
        written(tmp_path, (request(), result(tokens=tokens, finish=cut)))
    assert opened(tmp_path).find(request(), 0) == result(tokens=(7, 8, 9), finish=cut)
    written(tmp_path, (request(), result(tokens=(7, 8, 9, 1))))
    log = opened(tmp_path)
    assert log.find(request(), 0) == result(tokens=(7, 8, 9, 1))
    assert log.find(request(), 0) is None


def test_turns_of_lost_weights_and_of_weights_too_old_are_not_used(tmp_path):
    asked = [request(f"g{v}.0.t0") for v in range(6)]
    for v in range(6):
        written(tmp_path, (asked[v], result(asked[v].turn, version=v)), version=v, step=5, behind=9)
    log = opened(tmp_path, 4, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000003.turns", "v000004.turns"]
    assert [log.find(each, 4) is not None for each in asked] == [False] * 3 + [True, True, False]
    # the weights of step 5 are made anew: what the first ones made is gone for good
    assert opened(tmp_path, 5, 9).find(asked[5], 5) is None
    later = opened(tmp_path, 4, 1)
    assert later.find(asked[3], 5) is None and later.find(asked[4], 5) is not None
    assert later.find(asked[4], 6) is None


def test_a_turn_of_a_token_that_is_too_old_or_of_experts_that_are_not_known_is_not_used(tmp_path):
    mixed = msgspec.structs.replace(result(tokens=(7, 8)), versions=p.pack_tokens([3, 5]))
    written(tmp_path, (request(), mixed), version=5, step=5, behind=2)
    assert opened(tmp_path, 5, 1).find(request(), 5) is None
    assert opened(tmp_path, 5, 2).find(request(), 5) is not None
    asked, answer = msgspec.structs.replace(request(), routed=2), result(experts=b"ab", routed=2)
    written(tmp_path / "moe", (asked, answer))
    log = opened(tmp_path / "moe")
    assert log.find(request(), 0) is None and log.find(asked, 0) == answer


def test_what_a_checkpoint_makes_useless_goes_files_and_snapshots_also_of_other_tries(tmp_path):
    """An earlier attempt had replaced a member, and a group; this one needed neither. g0.0 was
    dropped before its snapshot was written."""
    log = opened(tmp_path / "turns", 0, 1)
    for version in range(4):
        log.add(request(), result(version=version), version)
    log.forget("g0.0")
    for name in ("g0.0", "g0.1", "g1.0", "g1.0r1", "g1r2.3", "g11.0", "g4.0r1", "e1-g1.0"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    log.trained(3, ["g1.0", "g1.1"])
    log.trained(4, ["g4.0"])
    log.checkpoint_saved(3)
    log.close()
    turns, left = ({path.name for path in (tmp_path / f).iterdir()} for f in ("turns", "snapshots"))
    assert turns == {"v000002.turns", "v000003.turns"}
    assert left == {"g0.1", "g11.0", "g4.0r1", "e1-g1.0"}


def test_a_torn_or_damaged_end_is_cut_off_and_the_file_grows_on(tmp_path):
    second = request("g0.1.t0")
    written(tmp_path, (request(), result()), (second, result(second.turn)))
    path = tmp_path / "v000000.turns"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-3] + b"x" + whole[-2:], whole[: len(whole) // 2 + 5]):
        path.write_bytes(damaged)
        log = opened(tmp_path)
        assert log.find(request(), 0) == result() and log.find(second, 0) is None
        written(tmp_path, (second, result(second.turn)))
        assert opened(tmp_path).find(second, 0) == result(second.turn)


def test_null_records_nothing_and_forgets_what_was_recorded_before(tmp_path):
    log = opened(tmp_path / "turns", 0, None)
    log.add(request(), result(), 0)
    log.flush()
    log.checkpoint_saved(1)
    log.close()
    assert log.find(request(), 0) is None and not (tmp_path / "turns").exists()
    written(tmp_path, (request(), result()))
    opened(tmp_path, 0, None)
    assert opened(tmp_path).find(request(), 0) is None


def test_a_resumed_run_answers_at_once_and_goes_on_within_a_turn(world, tmp_path):
    first = world
    for turn in ("g0.0.t0", "g0.1.t0", "g0.2.t0"):
        first.request(turn, new=4, seed=None)
    first.request("g0.3.t0", new=4, seed=5)
    first.progress([11, 12])
    first.finish([13])
    # No token of g0.2.t0 has arrived.
    first.progress([21], turn="g0.1.t0")
    first.progress([31], turn="g0.3.t0")
    first.hub.record_open_turns()

    again = World(tmp_path)
    again.ready("rollout-0")
    again.hub.weights.publish(0, "store")
    again.sent.clear()
    again.request("g0.0.t0", new=4, seed=None)
    [(rank, answer)] = again.sent
    assert (rank, answer.finish, tokens_of(answer)) == (HOST, p.FinishReason.STOP, [11, 12, 13])
    assert len(again.hub.ledger) == 0
    again.request("g0.1.t0", new=4, seed=None)
    [(_, work)] = again.taken(p.GenerateTurn)
    assert tokens_of(work) == [1, 2, 3, 21] and work.sampling.max_new_tokens == 3
    again.finish([22], turn="g0.1.t0")
    rank, whole = again.sent[-1]
    assert rank == HOST and tokens_of(whole) == [21, 22]
    assert p.unpack_tokens(whole.versions).tolist() == [0, 0] and whole.migrations == 0

    again.request("g0.2.t0", new=4, seed=None)
    again.request("g0.3.t0", new=4, seed=5)  # nothing is kept of a seeded turn that was cut
    assert [tokens_of(work) for _, work in again.taken(p.GenerateTurn)] == [[1, 2, 3]] * 2
    assert (again.hub.log.resumed_turns, again.hub.log.resumed_tokens) == (2, 4)


def test_a_run_that_failed_twice_at_a_step_makes_its_turns_anew(tmp_path, capsys):
    written(tmp_path, (request(), result()))  # the first start
    for _ in range(3):
        log = TurnLog(tmp_path, 0, 0)
        assert log._known
        log.stopped()
    for left in (True, True, False):
        assert bool(TurnLog(tmp_path, 0, 0)._known) is left
    assert "failed 2 times after step 0" in capsys.readouterr().out
    for step in (0, 1, 2, 3):
        TurnLog(tmp_path, step, 0)
    written(tmp_path, (request(), result()), version=3, step=3)
    assert TurnLog(tmp_path, 3, 0)._known, "it failed at other steps"
