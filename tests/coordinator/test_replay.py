"""A step's trajectories come back as they were saved."""

import msgspec
import pytest

from rose import config as configuration
from rose.config import ConfigError
from rose.coordinator import replay
from rose.protocol import Branch, pack_tokens
from tests.coordinator.conftest import trajectory

GROUPS = [
    [trajectory("g0.0", 1.0, 8, domain="calculator"), trajectory("g0.1", 0.0, 4)],
    [trajectory("g1.0", 0.0, 12, truncated=True)],
]


def test_saved_groups_come_back_whole(tmp_path):
    replay.save(tmp_path, 3, GROUPS)
    assert replay.load(tmp_path, 3) == GROUPS
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step-000003.msgpack"]


def test_trajectories_are_trained_as_they_were_made(tmp_path, make_config):
    replay.save(tmp_path, 1, GROUPS)
    others = {"rollout.temperature": ("0.7", "1"), "rollout.group_size": ("8", "4")}
    others["trainer.batch_size"] = ("32", "64")
    made = ["trainer.steps=1", *(f"{key}={value}" for key, (value, _) in others.items())]
    replay.check(tmp_path, make_config(*made, "rollout.temperature=1"))  # nobody knows
    configuration.save(make_config(*made), tmp_path / "config.json")
    replay.check(tmp_path, make_config(*made))
    for key, (value, other) in others.items():
        with pytest.raises(ConfigError, match=f"{key}={other}: .* with {key}={value}"):
            replay.check(tmp_path, make_config(*made, f"{key}={other}"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: is damaged"):
        replay.check(tmp_path, make_config(*made))


def test_rewards_of_turns_come_back_and_are_required_where_needed(tmp_path, make_config):
    told = dict(turn_tokens=[(0, 3), (1, 5)], turn_rewards=[0.25, 0.75])
    replay.save(tmp_path, 1, [[trajectory("g0.0", 1.0, 8, **told)]])
    [[found]] = replay.load(tmp_path, 1)
    assert (found.turn_tokens, found.turn_rewards) == ([(0, 3), (1, 5)], [0.25, 0.75])
    assert replay.summarise([[found]], make_config()).turn_rewards == [[0.25, 0.75]]
    replay.check_turn_rewards(tmp_path, "which A needs")
    replay.save(tmp_path, 1, GROUPS)
    words = "rollout.replay='.*: its .* no rewards of turns, which A"
    with pytest.raises(ConfigError, match=words):
        replay.check_turn_rewards(tmp_path, "which A needs")


@pytest.mark.parametrize("content", [None, b"", b"garbage", b"\x93\x01\x02\x03"])
def test_a_file_that_is_missing_or_holds_no_trajectories_is_named(tmp_path, content):
    replay.save(tmp_path, 3, GROUPS)
    if content is None:
        replay.path_of(tmp_path, 3).unlink()
    else:
        replay.path_of(tmp_path, 3).write_bytes(content)
    words = "is missing" if content is None else "holds no trajectories"
    with pytest.raises(ValueError, match=f"rollout.replay: .*step-000003.msgpack {words}"):
        replay.load(tmp_path, 3)


def test_the_summary_has_a_row_per_trajectory_in_the_order_of_the_groups(make_config):
    summary = replay.summarise(GROUPS, make_config())
    assert summary.groups == [0, 0, 1] and summary.rewards == [1.0, 0.0, 0.0]
    assert summary.response_tokens == [8, 4, 12] and summary.truncated == [False, False, True]
    limits = ("turns", "context", "answer")
    cut = [trajectory("g0.0", truncated=True, limit=limit) for limit in limits]
    truncated = replay.summarise([cut], make_config()).truncated
    assert truncated == [False, True, True], "to an algorithm only lengths truncate"


def test_the_closest_limit_is_that_of_a_turn_of_all_turns_or_of_the_context(make_config):
    c = make_config(
        "env.max_turns=3 env.max_new_tokens=20 model.max_context=100",
        "+env@eval.sets.s=calculator",
        "+eval.sets.s.episodes=1 eval.sets.s.max_turns=1 eval.sets.s.max_new_tokens=50",
    )

    def limit(tokens, turns, observed, branches=(), **others):
        made = trajectory("g0.0", 0.0, tokens, turn_tokens=turns, branches=list(branches), **others)
        own = tokens - sum(sum(leaf.mask) for leaf in branches)
        mask = bytes(observed) + b"\x01" * own
        written = pack_tokens([*range(observed + own)])
        return replay.closest_limit(msgspec.structs.replace(made, mask=mask, tokens=written), c)

    assert limit(19, [(0, 19)], 10) == (19, 20)
    assert limit(50, [(0, 20), (1, 20), (2, 10)], 10) == (50, 60)
    assert limit(25, [(0, 20), (1, 5)], 70) == (25, 30)
    assert limit(40, [(0, 40)], 10, domain="s") == (40, 50)
    mask = bytes(95) + b"\x01\x01"
    leaf = Branch(pack_tokens([*range(97)]), mask, b"", b"", [(1, 2)])
    assert limit(12, [(0, 10)], 10, [leaf]) == (12, 15)
    apart = Branch(pack_tokens([*range(100, 197)]), mask, b"", b"", [(1, 2)])
    assert limit(22, [(0, 10), (1, 10)], 10, [apart]) == (10, 20)  # a history of its own
