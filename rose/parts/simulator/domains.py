"""The environments of the papers as `Domain`s: statistics of their trajectories.

Each number has its source on its line (tests/parts/simulator/test_constants.py);
`sim.environment.factors` scales any of them. Three of the sources need an explanation:

- "the paper's rollout": the tokens per turn are chosen such that a rollout without borrowed GPUs
  takes as long as in ROSE (arXiv 2605.06534): about 680 s (FrozenLake) and 1,740 s (ALFWorld). This
  follows from its figure 1a, table 1 and gains, as a public reading note quotes them: 86.9 % of a
  step, 496 s with ROSE, 1.31 times as fast; Qwen3-32B 70.5 %, 960 s, 1.46.
- "traj_envs.yaml": max_actions_per_traj in ROLL's examples/config/traj_envs.yaml
  (github.com/alibaba/ROLL), the same for every environment.
- "from memory": the number was not looked up in the paper again.
"""

from __future__ import annotations

from dataclasses import replace

from rose.parts.simulator.environments import Domain, Drift, Heavy, constant

FROZEN_LAKE = Domain(
    name="frozen_lake",
    max_turns=10,  # ROLL's traj_envs.yaml
    max_new_tokens=8192,  # ours: longer than most turns
    prompt=Heavy(350, 0.05),  # ours: rules and a map; all prompts are nearly alike
    observation=Heavy(110, 0.1),  # ours: a map of 4 x 4 and a sentence
    output=Heavy(2000, 0.8, tail=0.05),  # arXiv 2605.06534, the paper's rollout; spread: ours
    output_factor=Drift(1.0, 1.2, 40),  # ours: thoughts grow as the policy learns
    turns=Heavy(6, 0.25),  # ours: a shortest path on the 4 x 4 map takes 6
    turns_factor=Drift(1.1, 1.0, 30),  # ours: detours get fewer
    failed_turns=Heavy(6, 0.6),  # ours: a hole ends an episode early, wandering late
    success=Drift(0.25, 0.75, 25),  # docs/benchmarks.md: 20-28 to 68-74 % in 30 steps, tiny model
    hardness=1.2,  # ours: maps differ less than maths problems
    tool_s=Heavy(0.01, 0.5, tail=0.01),  # ours: a step of a small program
    tool_fails=Drift(0.10, 0.02, 15),  # ours: unparsable moves, which the policy unlearns first
    failed_output=1.5,  # ours: a turn after a failed call is longer (Libra, arXiv 2606.03077)
    reset_s=Heavy(0.05, 0.5, tail=0.01),  # ours: a map is drawn
    crash=0.0,
    group_share=0.3,  # ours: lengths of a group correlate (Seer, arXiv 2511.14617)
    trajectory_share=0.4,  # ours: long thoughts recur in all turns of a trajectory
)

ALFWORLD = Domain(
    name="alfworld",
    # With 10 turns, 82 % of all tokens are input (ROSE: 77 to 86 %); with GiGPO's 50 turns, 97 %.
    max_turns=10,  # ROLL's traj_envs.yaml
    max_new_tokens=8192,  # ours: longer than most turns
    prompt=Heavy(700, 0.15),  # ours: the task, a room and its possible actions
    observation=Heavy(90, 0.5),  # ours: what is seen after an action
    output=Heavy(1600, 0.6, tail=0.05),  # arXiv 2605.06534, the paper's rollout; spread: ours
    output_factor=constant(1.0),
    turns=Heavy(8, 0.3),  # ours: most of the 10
    turns_factor=constant(1.0),
    failed_turns=Heavy(10, 0.15),  # ours: failing trajectories use all turns
    success=Drift(0.148, 0.776, 50),  # GiGPO (arXiv 2505.10978), table 1, from memory; 3 x 50 steps
    hardness=1.5,  # ours: six kinds of tasks
    tool_s=Heavy(0.1, 0.7, tail=0.03),  # ours: a text simulator's step
    tool_fails=Drift(0.15, 0.03, 30),  # ours: actions that the room doesn't allow
    failed_output=1.5,  # ours: a turn after a failed call is longer (Libra, arXiv 2606.03077)
    reset_s=Heavy(1.5, 0.6, tail=0.03),  # ours: a game file is loaded
    crash=0.002,  # ours: rare
    group_share=0.3,  # ours: lengths of a group correlate (Seer, arXiv 2511.14617)
    trajectory_share=0.3,  # ours: long thoughts recur in all turns of a trajectory
)

SWE = Domain(
    name="swe",
    max_turns=50,  # DeepSWE (together.ai/blog/deepswe), in training
    max_new_tokens=4096,  # ours: longer than most turns
    prompt=Heavy(2500, 0.5),  # ours: an issue and instructions
    observation=Heavy(350, 0.9, tail=0.02),  # ours: files and tests' output
    output=Heavy(300, 0.8, tail=0.05),  # ours: a command and its reason
    output_factor=Drift(1.0, 1.2, 100),  # ours: thoughts grow as the policy learns
    turns=Heavy(28, 0.4),  # ours: about half of max_turns
    turns_factor=Drift(1.0, 1.1, 100),  # ours: it learns to test more
    failed_turns=Heavy(38, 0.5),  # ours: failing trajectories try for longer
    success=Drift(0.23, 0.42, 70),  # DeepSWE (together.ai/blog/deepswe): 23 to 42 % in 200 steps
    hardness=2.0,  # ours: issues differ as much as maths problems
    tool_s=Heavy(0.8, 1.0, tail=0.05, alpha=1.1),  # ours: most are quick, test suites are not
    tool_fails=Drift(0.15, 0.08, 70),  # ours: commands that fail
    failed_output=1.5,  # ours: a turn after a failed call is longer (Libra, arXiv 2606.03077)
    reset_s=Heavy(8, 0.7, tail=0.03, alpha=1.2),  # ours: a container and a repository
    crash=0.01,  # ours: containers die now and then
    group_share=0.3,  # ours: lengths of a group correlate (Seer, arXiv 2511.14617)
    trajectory_share=0.2,  # ours: less, as turns are many and of many kinds
)

SEARCH = Domain(
    name="search",
    max_turns=4,  # Search-R1's training script (arXiv 2503.09516)
    max_new_tokens=500,  # Search-R1's training script (arXiv 2503.09516)
    prompt=Heavy(250, 0.3),  # ours: a question and instructions
    observation=Heavy(480, 0.1),  # Search-R1's training script (arXiv 2503.09516): at most 500
    output=Heavy(120, 0.6, tail=0.02),  # ours: a thought and a query
    output_factor=Drift(1.0, 1.2, 80),  # ours: thoughts grow as the policy learns
    turns=Heavy(2.4, 0.35),  # ours: most questions take two or three searches
    turns_factor=Drift(0.8, 1.2, 80),  # ours: it learns to search more
    failed_turns=Heavy(3.2, 0.4),  # ours: failing trajectories search for longer
    success=Drift(0.25, 0.43, 100),  # Search-R1 (arXiv 2503.09516), table 2, from memory: 0.431
    hardness=2.0,  # ours: the policy knows an answer or doesn't
    tool_s=Heavy(0.4, 0.6, tail=0.03),  # ours: a retrieval server under load
    tool_fails=constant(0.03),  # ours: timeouts
    failed_output=1.2,  # ours: a turn after a failed call is longer (Libra, arXiv 2606.03077)
    reset_s=Heavy(0.01, 0.1),  # ours: nothing to set up
    crash=0.0,
    group_share=0.3,  # ours: lengths of a group correlate (Seer, arXiv 2511.14617)
    trajectory_share=0.3,  # ours: long thoughts recur in all turns of a trajectory
)

MATHS = Domain(
    name="maths",
    max_turns=1,
    max_new_tokens=20480,  # DAPO (arXiv 2503.14476), from memory
    prompt=Heavy(120, 0.5),  # ours: a problem
    observation=Heavy(1, 0.0),
    output=Heavy(1200, 0.8, tail=0.05),  # ours: short before training, with DAPO's growth after
    output_factor=Drift(1.0, 4.0, 120),  # DAPO (arXiv 2503.14476), figures 6 and 7, from memory
    turns=Heavy(1, 0.0),
    turns_factor=constant(1.0),
    failed_turns=Heavy(1, 0.0),
    success=Drift(0.10, 0.50, 150),  # DAPO (arXiv 2503.14476), figures 6 and 7, from memory
    hardness=2.0,  # ours: many prompts are solved always or never, as DAPO's filter says
    tool_s=Heavy(0.1, 0.5, tail=0.01),  # ours: a checker of answers
    tool_fails=constant(0.0),
    failed_output=1.0,
    reset_s=Heavy(0.001, 0.1),  # ours: nothing to set up
    crash=0.0,
    group_share=0.4,  # ours: lengths of a group correlate (Seer, arXiv 2511.14617)
    trajectory_share=0.0,
)

# The workloads of other papers' evaluations (conf/experiment/papers): single responses of one turn,
# and R2E-Gym. Lengths are the paper's if it states them, otherwise ours. Fields that are not named
# are those of MATHS or SWE.

ROLLPACKER = replace(
    MATHS,
    name="rollpacker",
    max_new_tokens=32768,  # arXiv 2509.21009, section 6: the longest of its settings
    # P75 is 755 to 1,100 tokens, the longest reach 16k; the shape between them is ours.
    output=Heavy(450, 1.0, tail=0.05),  # arXiv 2509.21009, section 2.2
    output_factor=constant(1.0),
)

OPENR1 = replace(
    MATHS,
    name="openr1",
    max_new_tokens=14336,  # github.com/Terra-Flux/PolyRL, run_async_grpo8b_pipeline.sh
    output=Heavy(5000, 0.7),  # ours: Qwen3 thinks for some thousands of tokens
    output_factor=constant(1.0),
    success=constant(0.6),  # ours: no policy here depends on it
)

AREAL_MATHS = replace(
    MATHS,
    name="areal_maths",
    max_new_tokens=27648,  # arXiv 2505.24298, table 3
    # 128,700 tokens/s for 41.0 h, over 250 steps of 8,192 responses, are 9,300 per response.
    output=Heavy(7100, 0.8),  # arXiv 2505.24298, figure 5c and table 1; the spread is ours
    output_factor=constant(1.0),
    success=constant(0.6),  # ours: no policy here depends on it
)

SEER_VL = replace(
    MATHS,
    name="seer_vl",
    max_new_tokens=40960,  # arXiv 2511.14617, from memory
    output=Heavy(4600, 1.0),  # arXiv 2511.14617, from memory: 7,615 on average; spread: ours
    output_factor=constant(1.0),
    success=constant(0.5),  # ours: no policy here depends on it
    group_share=0.6,  # ours: the paper's figures show groups as far more alike than prompts
)

R2E = replace(
    SWE,
    name="r2e",
    max_turns=12,  # github.com/NetX-lab/Libra: r2e_max_turns
    max_new_tokens=8192,  # ours: a trajectory may have 30,000
    prompt=Heavy(1500, 0.3),  # ours: r2e_max_prompt_tokens is 2,048
    output=Heavy(500, 0.9, tail=0.05),  # ours: a thought, then an edit or a command
    turns=Heavy(8, 0.4),  # ours: two thirds of max_turns
    failed_turns=Heavy(11, 0.3),  # ours: most use all turns
)

PAPERS = (ROLLPACKER, OPENR1, AREAL_MATHS, SEER_VL, R2E)
DOMAINS = {each.name: each for each in (FROZEN_LAKE, ALFWORLD, SWE, SEARCH, MATHS, *PAPERS)}


def domain(name: str) -> Domain:
    """Return the domain of this name. Raises `ValueError` for an unknown name."""
    if name not in DOMAINS:
        raise ValueError(
            f"environment {name!r}: its trajectories are unknown; known are {', '.join(DOMAINS)} "
            "(rose/parts/simulator/domains.py)"
        )
    return DOMAINS[name]
