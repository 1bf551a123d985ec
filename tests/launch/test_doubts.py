"""The plan's warnings about configurations that are allowed and probably not meant, and what it refuses
because an algorithm, trees or hybrid engines lack what they need."""

import pytest

from rose import checks
from rose.agent.scoring import Scoring
from rose.launch import doubts
from tests.refusals import refused, table

CAP = "algorithm.importance_cap=0.4 algorithm.importance"
HYBRID = "rollout.hybrid=1 scheduler.provisioning"
LACKING = f"""
algorithm=turn_grpo -> env.name='frozen_lake': gives no rewards of turns, which algorithm
algorithm=turn_grpo env=agent env.args.command=/bin/true -> env.name='agent': | or algorithm=grpo
algorithm=turn_grpo env=games env.members.frozen_lake.args.shaping=0.5
    -> env.members.calculator.name='calculator': gives no rewards of turns
algorithm=turn_grpo env.args.shaping=0.5 reward=function reward.args.path=posixpath:basename
    -> reward.name='function': replaces | reward=sum with a part {{name: environment}}
algorithm=tree_grpo -> algorithm.name='tree_grpo' | rollout/branch=tree
algorithm=tree_grpo rollout/branch=tree rollout.group_size=4
    -> rollout.branch.ways=[2, 2] | rollout.group_size=4 | one tree
rollout/branch=tree env=agent env.args.function=os:getcwd -> env.name='agent' | rollout/branch=none
{CAP}_floor=0.5 -> importance_floor=0.5: needs | above it, which is 0.4
{CAP}_floor=0.5 algorithm.importance_cap=null -> which is null
{CAP}_level=sequence algorithm.importance_cap=null -> importance_level=sequence: has no effect
algorithm=grpo algorithm.importance_cap=null scheduler/batching=bounded_staleness
    -> name='bounded_staleness' trains on data up to 4 versions old, and nothing corrects
    | importance_cap=null; take algorithm=decoupled_ppo, or
{HYBRID}.name=rose.policies.plain:Fixed {HYBRID}.args={{}} -> plain:Fixed' | rollout.hybrid=1 | wakes_hybrids
"""
SUMMED = "reward=sum reward.args.parts={own: {name: environment, weight: 0.5}, "
SUMMED += "more: {name: function, args: {path: 'posixpath:basename'}}}"
ENOUGH = f"""
algorithm=turn_grpo env.args.shaping=0.5
algorithm=turn_grpo env.args.shaping=1 {SUMMED}
rollout/branch=tree
rollout/branch=tree algorithm=tree_grpo
{CAP}_level=sequence
{CAP}_floor=0.2
scheduler/batching=bounded_staleness algorithm=grpo
scheduler/batching=bounded_staleness algorithm=decoupled_ppo algorithm.importance_cap=null
{HYBRID}.name=rose.parts.rivals.rlboost:RlBoost scheduler.provisioning.args={{initial_s: 1.0, minimum_s: 0.0}}
env=games scheduler/routing=rollart +scheduler.routing.args.hardware.calculator=H20
"""


@pytest.mark.parametrize("overrides, words", table(LACKING))
def test_what_lacks_something_that_it_needs_is_refused(tree, overrides, words):
    with refused(words):
        checks.check(tree(overrides, "cluster.dry_run=true"))


@pytest.mark.parametrize("overrides", ENOUGH.strip().splitlines())
def test_what_has_all_that_it_needs_is_taken(tree, overrides):
    checks.check(tree(overrides, "cluster.dry_run=true"))


def test_rewards_of_turns_may_be_part_of_a_sum(make_config):
    summed = make_config("env.args.shaping=1", SUMMED).reward
    # half of the environment's, and the function's 2 at the end
    given = Scoring(summed, [1], lambda *_: None).turn_rewards([1.0, 0.0, 0.5], 2.75)
    assert given == [0.5, 0.0, 2.25]
    replaced = make_config("reward=function").reward
    assert Scoring(replaced, [1], lambda *_: None).turn_rewards([1.0, 0.0], 3.0) == []


DAPO = "env.max_turns=10 env.max_new_tokens=16 model.max_context=512 algorithm=dapo"
LONG = "algorithm=dapo algorithm.args.max_response_tokens=20000 model.max_context=8192 "
LONG += "env.max_turns=100 env.max_new_tokens=1000 trainer.micro_batch_tokens=8192"
PROGRAM = "env=agent env.args.command=true"
VARIABLES = "env.args.environment=[MY_VAR,NOPE_VAR]"
SETS = "+env@eval.sets.sums=calculator +eval.sets.sums.episodes=8 eval.episodes=16"
# Runs and what is doubtful about them, and runs of which this is not said.
DOUBTFUL = f"""
rollout.temperature=0.7 rollout.top_k=3
    -> rollout.top_k=3: tokens that are left out are never tried | weights correct; 0 is exact
rollout.top_p=0.9 algorithm.importance_cap=null
    -> no weight corrects (algorithm.importance_cap=null); 1 is exact
trainer.optimizer.warmup_steps=300 trainer.steps=30 trainer.optimizer.schedule=constant
    -> trainer.optimizer.warmup_steps=300: trainer.steps=30 gives
    | at a learning rate of 0.00012, not trainer.optimizer.lr=0.0012
trainer.zero_stage=3 -> trainer.zero_stage=2 has the same
{DAPO} algorithm.args.max_response_tokens=512 algorithm.args.overlong_buffer=352
    -> no trajectory of env reaches
{DAPO} algorithm.args.overlong_buffer=16
    -> env.max_new_tokens=16, so that its first token is punished already; null
{LONG} -> no trajectory of env reaches
algorithm=dapo -> algorithm.args.clip_high=0.28: without effect at trainer.updates_per_
algorithm=grpo algorithm.args.dual_clip=3 -> algorithm.args.dual_clip=3: without effect
algorithm=gspo -> algorithm.args.clip_low=0.0003, algorithm.args.clip_high=0.0004: with
{PROGRAM} {VARIABLES} -> env.args.environment=['MY_VAR', 'NOPE_VAR']: NOPE_VAR is not set here
rollout.replay=earlier {SETS}
    -> rollout.replay=earlier starts no engines: none of the 24 held-out
"""
UNDOUBTED = f"""
rollout.temperature=0.7 -> left out
trainer.zero_stage=3 trainer.ranks=2 -> has the same
trainer.zero_stage=2 -> has the same
{DAPO} -> punish
{DAPO} algorithm.args.overlong_buffer=15 -> punish
{DAPO} algorithm.args.max_response_tokens=199 -> punish
{DAPO} algorithm.args.max_response_tokens=512 algorithm.args.overlong_buffer=353 -> punish
{DAPO} algorithm.args.max_response_tokens=5000 algorithm.args.overlong_buffer=0 -> punish
algorithm=dapo algorithm.args.max_response_tokens=512 env.max_turns=400 -> punish
{PROGRAM} {LONG} -> punish
algorithm=grpo -> without effect
algorithm=rloo -> without effect
algorithm=dapo trainer.updates_per_step=2 -> without effect
{PROGRAM} {VARIABLES} +cluster.env.NOPE_VAR=x -> is not set here
{SETS} -> held-out
rollout.replay=earlier eval.episodes=0 -> held-out
"""


@pytest.mark.parametrize("overrides, words", table(DOUBTFUL) + table(UNDOUBTED))
def test_doubts_are_about_what_has_no_effect_or_another_than_it_seems(
    make_config, monkeypatch, overrides, words
):
    monkeypatch.setenv("MY_VAR", "")
    c = make_config(overrides)
    found = " ".join(doubts.of(c, 0, corrects=False) + doubts.unclipped(c, recomputes=True))
    doubtful = (overrides, words) in table(DOUBTFUL)
    assert [word in found for word in words] == [doubtful] * len(words), found


def test_a_doubt_may_depend_on_the_policies(make_config):
    """Ratios to the engine's policy can differ from 1 even in a step's first update, and veRL's
    recipe trains one version late without a correction."""
    assert doubts.unclipped(make_config("algorithm=dapo"), recomputes=False) == ()
    late = make_config("scheduler/batching=one_step_off", "algorithm.importance_cap=null")
    [doubt] = doubts.stale(late, 1, corrects=False)
    assert "up to 1 versions old" in doubt
