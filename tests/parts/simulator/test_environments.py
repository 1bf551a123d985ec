"""Made trajectories are bounded, heavy-tailed and the same for every rival scheduler."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.simulator.domains import DOMAINS
from rose.parts.simulator.environments import Domain, Environments, Heavy


def draw(index: int) -> np.random.Generator:
    return np.random.default_rng((7, index))


def episodes(domain: Domain, version: int, groups: int = 120):
    made = Environments((domain,), 65536)
    drawn = [made.group(index, 16, version, draw(index)) for index in range(groups)]
    return [member for group in drawn for member in group]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*DOMAINS]), st.integers(0, 10**4), st.integers(0, 400), st.integers(1, 16))
def test_an_episode_keeps_within_its_turns_its_tokens_and_its_context(name, index, version, size):
    domain, context = DOMAINS[name], 8192
    for member in Environments((domain,), context).group(index, size, version, draw(index)):
        new, seen = member.output_tokens, member.observation_tokens
        assert 1 <= len(new) <= domain.max_turns
        assert len(new) == len(seen) == len(member.tool_s) == len(member.failed)
        assert all(1 <= tokens <= domain.max_new_tokens for tokens in new)
        assert min(seen) >= 0 and min(member.tool_s) >= 0 and member.reset_s >= 0
        assert member.prompt_tokens + sum(new) + sum(seen) <= context
        assert member.reward in (0.0, 1.0) and not (member.crashed and member.reward)


@pytest.mark.parametrize("name", DOMAINS)
def test_success_is_what_the_version_has_learnt(name):
    domain = DOMAINS[name]
    for version in (0, 1000):
        won = np.mean([member.reward for member in episodes(domain, version, 60)])
        lost = domain.crash + 0.03  # a few run out of context
        assert domain.success.at(version) - lost - 0.06 <= won <= domain.success.at(version) + 0.06


def test_the_same_prompt_at_another_version_has_the_same_draws():
    made = Environments((DOMAINS["maths"],), 32768)
    early, late = (made.group(3, 16, version, draw(3)) for version in (0, 500))
    pairs = [(a.output_tokens[0], b.output_tokens[0]) for a, b in zip(early, late, strict=False)]
    assert all(b == pytest.approx(3.95 * a, rel=0.02, abs=4) or b == 20480 for a, b in pairs)
    assert made.group(3, 16, 0, draw(3)) == early


def test_members_of_a_group_share_their_prompt_and_are_alike_in_length():
    made = Environments((DOMAINS["maths"],), 32768)
    logs = np.log([[m.output_tokens[0] for m in made.group(i, 16, 0, draw(i))] for i in range(400)])
    between, within = logs.mean(1).var(), logs.var(1).mean()
    assert 0.25 < between / (between + within) < 0.5  # group_share 0.4, less the tail's share
    assert len({m.prompt_tokens for m in made.group(5, 16, 0, draw(5))}) == 1


@pytest.mark.parametrize("name", ["frozen_lake", "alfworld", "swe", "maths"])
def test_a_few_trajectories_are_many_times_as_long_as_the_median(name):
    version = 1000 if name == "alfworld" else 0
    made = [sum(member.output_tokens) for member in episodes(DOMAINS[name], version)]
    assert np.percentile(made, 99) > 3 * np.median(made)


def test_alfworlds_requests_are_input_to_the_share_that_the_paper_says():
    read = written = 0
    for member in episodes(DOMAINS["alfworld"], 0):
        context = member.prompt_tokens
        for output, observed in zip(member.output_tokens, member.observation_tokens, strict=True):
            read, written, context = read + context, written + output, context + output + observed
    assert 0.77 < read / (read + written) < 0.86


def test_a_turn_after_a_failed_call_is_longer():
    after = {True: [], False: []}
    for member in episodes(DOMAINS["swe"], 0):
        for failed, tokens in zip(member.failed, member.output_tokens[1:], strict=False):
            after[failed].append(np.log(tokens))
    assert np.exp(np.mean(after[True]) - np.mean(after[False])) == pytest.approx(1.5, rel=0.1)


def test_prompts_are_of_the_domains_by_weight():
    made = Environments((DOMAINS["search"], DOMAINS["swe"]), 65536, (3.0, 1.0))
    names = [made.group(i, 1, 0, draw(i))[0].domain for i in range(400)]
    assert names.count("search") / 400 == pytest.approx(0.75, abs=0.07)
    assert set(names) == {"search", "swe"}
    assert made.max_new_tokens == DOMAINS["swe"].max_new_tokens


def test_every_parameter_can_be_scaled_for_the_sensitivity_table():
    fixed = {"name", "max_turns", "max_new_tokens", "tool_fails"}
    for domain in DOMAINS.values():
        for parameter in set(domain.__dataclass_fields__) - fixed:
            none = getattr(domain, parameter) in (0.0, Heavy(1, 0.0))
            assert none or domain.scaled(parameter, 1.2) != domain
