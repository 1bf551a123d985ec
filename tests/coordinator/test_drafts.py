"""Siblings' turns reach the engines that draft from them, and how engines decode is counted."""

from rose import protocol as p
from rose.coordinator.drafts import CONTEXT_BYTES, LEAST_BYTES, MOST_BYTES, Decoding, Siblings


def request(turn: str, context: int = 40) -> p.TurnRequest:
    trajectory = turn.rpartition(".")[0]
    tokens = p.pack_tokens(range(context))
    sampling = p.Sampling(max_new_tokens=4096)
    group = trajectory.partition(".")[0]
    return p.TurnRequest(turn, trajectory, group, p.Phase.TRAIN, tokens, sampling)


class World:
    def __init__(self) -> None:
        self.sent: list[tuple[int, p.SiblingTurns]] = []
        self.siblings = Siblings(lambda rank, message: self.sent.append((rank, message)))

    def got(self, turn: str, worker: str, count: int) -> None:
        self.siblings.add_tokens(request(turn), worker, p.pack_tokens([7] * count))

    def flushed(self, worker: str = "b", groups=("g0",)) -> list[tuple[str, int, int]]:
        """(turn, start, tokens) of what it was sent."""
        self.sent.clear()
        self.siblings.flush(worker, 1, groups)
        return [(t.turn, t.start, len(t.tokens) // 4) for _, m in self.sent for t in m.turns]


def test_an_engine_gets_what_its_groups_turns_got_elsewhere_once():
    world = World()
    world.got("g0.0.t0", "a", 20)
    world.got("g1.0.t0", "a", 20)
    assert world.flushed(groups=[]) == []
    assert world.flushed() == [("g0.0.t0", 0, 20)]
    assert len(world.sent[0][1].turns[0].before) == CONTEXT_BYTES
    assert world.flushed() == [] and world.sent == []
    world.got("g0.0.t0", "a", 16)
    assert world.flushed() == [("g0.0.t0", 20, 16)]
    assert world.flushed("a") == []  # who made it has it


def test_few_tokens_of_an_open_turn_wait_for_more_and_its_end():
    world = World()
    world.got("g0.0.t0", "a", LEAST_BYTES // 4 - 1)
    assert world.flushed() == []
    world.siblings.turn_ended(request("g0.0.t0"))
    assert world.flushed() == [("g0.0.t0", 0, LEAST_BYTES // 4 - 1)]


def test_a_turn_that_moved_is_known_to_the_engine_that_goes_on_with_it():
    world = World()
    world.got("g0.0.t0", "a", 20)
    world.got("g0.0.t0", "b", 20)
    assert world.flushed("b") == []
    assert world.flushed("a") == [("g0.0.t0", 20, 20)]


def test_an_engine_that_started_again_gets_all_again():
    world = World()
    world.got("g0.0.t0", "a", 20)
    world.flushed()
    world.siblings.forget_worker("b")
    assert world.flushed() == [("g0.0.t0", 0, 20)]


def test_a_message_is_bounded_and_the_rest_follows():
    world, tokens = World(), MOST_BYTES // 4 + 100
    world.got("g0.0.t0", "a", tokens)
    assert world.flushed() == [("g0.0.t0", 0, MOST_BYTES // 4)]
    assert world.flushed() == [("g0.0.t0", MOST_BYTES // 4, 100)]


def test_a_group_that_ended_is_forgotten_here_and_there():
    world = World()
    world.got("g0.0.t0", "a", 20)
    world.flushed()
    world.siblings.group_ended("g0")
    assert world.flushed() == [] and world.sent[0][1].ended == ["g0"]
    assert world.flushed() == [] and world.sent == []
    assert world.siblings._groups == {} and not any(world.siblings._have.values())
    assert not any(world.siblings._new.values())


def test_engines_steps_are_counted_from_heartbeats_over_restarts():
    decoding = Decoding()

    def load(incarnation: int, tokens: int, steps: int, drafted: int, accepted: int) -> None:
        decoding.count(
            p.WorkerLoad("a", incarnation, 1, 0, 0.0, tokens, 0, 0, steps, drafted, accepted)
        )

    load(1, 100, 50, 0, 0)
    assert decoding.row() == {"tokens_per_engine_step": 2.0}
    decoding.begin_step()
    load(1, 160, 70, 40, 20)
    load(2, 20, 20, 10, 0)
    expected = {"tokens_per_engine_step": 2.0, "drafted_tokens": 50, "accepted_tokens": 20}
    assert decoding.row() == expected
