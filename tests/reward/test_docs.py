"""What docs/rewards.md prints works as it stands."""

import asyncio

import printed

from rose.reward import scorers
from tests.made import episode


def test_the_function_tells_good_episodes_of_its_own_command_from_bad_ones(make_config, tmp_path):
    printed.write("rewards.md", tmp_path)
    overrides = printed.overrides("rewards.md", "short")
    c = make_config(*(word.replace("mine.py", f"{tmp_path}/mine.py") for word in overrides))
    scorer = scorers.build(c.reward.name, c.reward.args)

    def scored(success: bool, turns: int):
        ended = episode(reward=float(success), success=success, turns=turns)
        return asyncio.run(scorer.score(ended, 60.0))

    assert list(c.environments) == ["frozen_lake"]
    assert scored(True, 4).reward > scored(True, 9).reward > scored(False, 3).reward == 0
    assert scored(True, 4).success is True and scored(False, 3).success is False
