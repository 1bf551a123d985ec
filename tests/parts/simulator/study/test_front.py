"""`mode=simulate` and `mode=plan` from the command line: refused with words, or answered with a
table and a page."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rose import front as launcher
from rose.config import ConfigError
from rose.parts.simulator.config import from_dict
from rose.parts.simulator.driver import simulate
from rose.parts.simulator.study import build, front

REPOSITORY = Path(__file__).resolve().parents[4]
CONF = REPOSITORY / "conf"
SMALL = (
    "model=qwen3_8b",
    "trainer.batch_size=16",
    "trainer.micro_batch_tokens=16384",
    "rollout.group_size=4",
    "sim/systems=[roll_grpo]",
    "sim.steps=2",
    "sim.warmup=1",
    "sim.seeds=[1,2]",
    "sim.processes=1",
    "sim.n_serving=2",
    "sim.serving.rate=1.0",
    "sim.serving.args.seconds=60",
)


@pytest.fixture
def answer(tree, tmp_path, monkeypatch):
    """answer(("a=b", ...), ...) -> (exit code, what was printed), one configuration per tuple, in
    an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*points):
        console = Console(width=220, record=True, quiet=False, file=open(tmp_path / "said", "w"))
        code = front.main(
            [from_dict(tree(*SMALL, *point)) for point in points], console, "python launch.py ..."
        )
        return code, console.export_text()

    return run


@pytest.mark.parametrize(
    "changed, words",
    [
        (
            "scheduler.routing.args.imbalance=-1",
            ["imbalance=-1: share of a worker's capacity, 0 or more"],
        ),
        ("sim.seeds=[1,1]", ["sim.seeds=[1, 1]", "different"]),
        ("sim.warmup=8", ["sim.warmup=8", "below sim.steps=2"]),
        (
            "sim.systems.roll_grpo={pools: [hybrid], stream: true}",
            ["sim.systems.roll_grpo.stream=True", "roll out until the batch is complete", "hybrid"],
        ),
        ("sim.pools=[dedicated,cloud]", ["cloud", "dedicated, cooperative, spot, lend, hybrid"]),
        ("sim.pools=[]", ["sim.pools=[]: one or more different ones of dedicated, cooperative"]),
        (
            "sim.pools=[dedicated,dedicated]",
            ["sim.pools=['dedicated', 'dedicated']: one or more different ones"],
        ),
        ("sim.systems.roll_grpo.pools=[cloud]", ["sim.systems.roll_grpo.pools=['cloud']"]),
        ("sim.label=''", ["sim.label=''"]),
        ("+sim.efficiency.compute=0", ["sim.efficiency.compute=0", "above 0"]),
        (
            "+sim.environment.factors.max_turns=2",
            ["sim.environment.factors.max_turns=2", "parameters are prompt, obs"],
        ),
        (
            "+sim.environment.factors.group_share=4",
            ["factors {'group_share': 4", "shares of one variance, 1 at most"],
        ),
        (
            "+sim.environment.factors.hardness=1e6",
            ["hardness of frozen_lake is 1.2e+06: 100 at most"],
        ),
        ("+sim.environment.factors.tool_s=1e12", ["tool_s of frozen_lake is 1e+10: 86400 at most"]),
        (
            "scheduler.routing.args.imbalance=half",
            ["scheduler.routing.args.imbalance='half': expected `float`, got `str`"],
        ),
        (
            "scheduler.batching.args.max_admitted=null",
            ["scheduler.batching.args.max_admitted=None: expected `float`"],
        ),
        ("sim.pool.dedicated.gpu=H900", ["sim.pool.dedicated.gpu='H900'", "H800"]),
        (
            "sim.pool.dedicated.tensor_parallel=5",
            ["sim.pool.dedicated.tensor_parallel=5", "32 attention heads"],
        ),
        ("sim.environment.domains=[chess]", ["sim.environment.domains='chess'", "frozen_lake"]),
        ("+sim.environment.factors.outputs=2", ["sim.environment.factors.outputs=2", "output"]),
        ("+sim.efficiency.computing=0.5", ["sim.efficiency.computing=0.5", "compute"]),
        ("sim.serving.model=gpt", ["sim.serving.model='gpt'", "qwen2_5_7b"]),
        ("sim.serving.trace=/nowhere.csv", ["sim.serving.trace='/nowhere.csv'"]),
        (
            "+sim.systems.roll_grpo.scheduler.routing.args.x=1",
            ["sim.systems.roll_grpo.scheduler.routing.args.x=1"],
        ),
        ("model.shape=null", ["model.shape=None", "mode=simulate"]),
    ],
)
def test_a_bad_value_is_named_before_anything_is_simulated(answer, tmp_path, changed, words):
    with pytest.raises(ConfigError) as refused:
        answer(("mode=simulate", changed))
    for word in words:
        assert word in str(refused.value)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    "changed, words",
    [
        ("rollout.draft.tokens=3", ["rollout.draft.tokens=3", "2, 4, 8 tokens", "replay_drafts"]),
        ("sim.draft.siblings=[1,2,3,4,5]", ["sim.draft.siblings=[1, 2, 3, 4, 5]: ascending"]),
        ("sim.draft.chances=[0.5]", ["drafted of tokens=8", "5 (siblings) of 1 (chances)"]),
    ],
)
def test_acceptance_that_is_none_is_named(answer, changed, words):
    with pytest.raises(ConfigError) as refused:
        answer(("mode=simulate", "sim/systems=[seer]", "sim/draft=calls", changed))
    for word in words:
        assert word in str(refused.value)


def test_drafts_make_rollouts_shorter_for_the_systems_that_have_them(tree):
    """And change nothing of the others."""

    def rollout_s(*point):
        c, found = from_dict(tree(*SMALL, "mode=simulate", "sim/systems=[seer]", *point)), {}
        for name, system in build.systems(c).items():
            what, scheduler = build.make_spec(c, name, system, 1), build.make_scheduler(c, system)
            found[name] = [s.training_at - s.began for s in simulate(what, scheduler, 1).steps]
        return found

    drafting, without = rollout_s("sim/draft=calls"), rollout_s()
    assert sum(drafting["seer"]) < sum(without["seer"])
    assert drafting["this"] == without["this"]


@pytest.mark.parametrize(
    "changed, words",
    [
        (
            "scheduler.routing.args.default=H20",
            ["scheduler.routing.args.default='H20': no pool", "its pools have H800"],
        ),
        (
            "+scheduler.routing.args.hardware.chess=H800",
            ["hardware.chess='H800': no such domain", "there are frozen_lake"],
        ),
        (
            "+sim.systems.rollart.scheduler.routing.args.hardware.frozen_lake=H20",
            ["sim.systems.rollart.scheduler.routing.args.hardware.frozen_lake='H20': no pool"],
        ),
    ],
)
def test_a_domain_that_is_sent_to_hardware_that_nobody_has_is_named(answer, changed, words):
    with pytest.raises(ConfigError) as refused:
        answer(("mode=simulate", "sim/systems=[rollart]", "scheduler/routing=rollart", changed))
    for word in words:
        assert word in str(refused.value)


def test_a_trace_file_needs_no_other_key_and_a_limit_too_large_is_refused(answer, tmp_path):
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(
            f"2023-11-16 18:{second // 60:02d}:{second % 60:02d},{100 + second},20\n"
            for second in range(600)
        )
    )
    said = answer(
        (
            "mode=simulate",
            "sim.seeds=[1]",
            f"sim.serving.trace={trace}",
            "sim.executor=memory_only",
            "scheduler/provisioning=static",
        )
    )
    assert said[0] == 0
    with pytest.raises(ConfigError, match="sim.serving.trace=.*max_prompt"):
        answer(
            (
                "mode=simulate",
                f"sim.serving.trace={trace}",
                "+sim.serving.args.max_prompt=9000000000000000000",
            )
        )


def test_a_trace_too_short_to_find_a_rate_is_refused_with_what_to_give(answer, tmp_path):
    trace = tmp_path / "short.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,9,9\n2023-11-16 "
        "18:00:01,9,9\n"
    )
    with pytest.raises(ConfigError, match="2 requests keep the targets however fast they come"):
        answer(("mode=simulate", f"sim.serving.trace={trace}", "sim.serving.rate=null"))


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_simulated(answer, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match="output_dir='taken': .*taken"):
        answer(("mode=simulate", "output_dir=taken"))


def test_the_launcher_answers_and_says_where_the_page_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert launcher.main(CONF, ["mode=simulate", *SMALL, "sim.seeds=[1]"]) == 0
    assert "outputs/frozenlake/report.html" in capsys.readouterr().out


def test_a_simulation_prints_a_table_and_leaves_a_page_a_csv_and_a_json(answer, tmp_path):
    code, said = answer(("mode=simulate", "sim.label=mine"))
    folder = tmp_path / "outputs" / "frozenlake"
    assert code == 0 and "roll_grpo" in said and "mine is faster by" in said
    rows = list(csv.DictReader((folder / "result.csv").open()))
    expected = [("roll_grpo", "1"), ("mine", "1"), ("roll_grpo", "2"), ("mine", "2")]
    assert [(row["system"], row["seed"]) for row in rows] == expected
    result = json.loads((folder / "result.json").read_text())
    assert result["gains"]["roll_grpo"]["low"] <= result["gains"]["roll_grpo"]["mean"]
    page = (folder / "report.html").read_text()
    assert 'id="fig-timeline"' in page and 'id="fig-slo"' in page and "python launch.py ..." in page
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page)


@pytest.mark.parametrize(
    "changed, words",
    [
        ("sim.sandboxes.cores=[]", "sim.sandboxes.cores=[]: those of at least one host"),
        ("sim.sandboxes.memory_gib=1", "sim.sandboxes.sandbox_mib=1280: no host has room for one"),
        ("sim.sandboxes.changes.none.share=0.9", "shares of none, files, process are 1.212"),
    ],
)
def test_sandboxes_that_are_none_are_named(answer, changed, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        answer(("mode=simulate", "sim.sandboxes.hosts=1", changed))


def test_a_table_has_columns_of_sandboxes_where_there_are_some(answer, tmp_path):
    """And each system's own way to recover."""
    _, said = answer(("mode=simulate", "sim.seeds=[1]"))
    assert "SLO kept" in said and "Made twice" not in said
    boxes = ("sim.sandboxes.hosts=2", "sim.sandboxes.mtbf_h=0.02", "sim.sandboxes.look_s=0")
    systems = "sim/systems=[recovery_none,recovery_replay,recovery_full]"
    code, said = answer(("mode=simulate", "sim.seeds=[1]", "name=boxes", systems, *boxes))
    assert code == 0 and "Made twice" in said and "Hosts lost/step" in said
    rows = csv.DictReader((tmp_path / "outputs" / "boxes" / "result.csv").open())
    found = {row["system"]: row for row in rows}
    assert float(found["recovery_none"]["remade"]) > 0 == float(found["recovery_replay"]["remade"])
    full, classified = (float(found[name]["saved_mb"]) for name in ("recovery_full", "this"))
    assert full > classified > 0 == float(found["recovery_none"]["saved_mb"])


def test_the_same_configuration_gives_the_same_numbers(answer, tmp_path):
    def numbers(name):
        answer(("mode=simulate", f"name={name}"))
        rows = csv.DictReader((tmp_path / "outputs" / name / "result.csv").open())
        return [
            {key: value for key, value in row.items() if key not in ("point", "wall_s")}
            for row in rows
        ]

    assert numbers("a") == numbers("b")


def test_a_sweep_has_one_page_that_compares_its_points(answer, tmp_path):
    points = [
        "frozenlake-scheduler.routing=round_robin",
        "frozenlake-scheduler.routing=least_loaded",
    ]
    code, said = answer(
        *(
            ("mode=simulate", f"scheduler/routing={point.split('=')[1]}", f"name={point}")
            for point in points
        )
    )
    page = (tmp_path / "outputs" / "frozenlake-sweep.html").read_text()
    assert code == 0
    for point in points:
        assert (tmp_path / "outputs" / point / "report.html").exists()
        assert f'href="{point}/report.html"' in page
    assert said.count("roll_grpo, seed") == 2  # the rival is the same at both points


def test_a_sweep_over_numbers_has_a_curve(answer, tmp_path):
    answer(
        *(
            ("mode=simulate", f"sim.n_serving={n}", f"name=x-sim.n_serving={n}", "sim.seeds=[1]")
            for n in (1, 2)
        )
    )
    page = (tmp_path / "outputs" / "x-sweep.html").read_text()
    assert '"x":[1.0,2.0],"axis":"sim.n_serving"' in page and "fig-sweep-step" in page


def test_a_plan_advises_the_cheapest_pair_that_reaches_the_target_and_says_why(answer, tmp_path):
    code, said = answer(
        (
            "mode=plan",
            "sim.plan.dedicated=[1,2]",
            "sim.plan.borrowed=[0,2]",
            "sim.plan.steps_per_hour=1",
            "sim.seeds=[1]",
        )
    )
    assert code == 0 and "advised" in said and "1 dedicated + 0 borrowed" in said
    answered = json.loads((tmp_path / "outputs" / "frozenlake" / "result.json").read_text())
    assert answered["advised"]["dedicated_gpus"] == 1 and len(answered["pairs"]) == 4
    assert len(answered["reasons"]) >= 2
    assert "fig-sweep-step" in (tmp_path / "outputs" / "frozenlake" / "report.html").read_text()


def test_a_plan_says_when_nothing_that_was_tried_is_enough(answer):
    code, said = answer(
        (
            "mode=plan",
            "sim.plan.dedicated=[1]",
            "sim.plan.borrowed=[0]",
            "sim.seeds=[1]",
            "sim.plan.steps_per_hour=1e6",
        )
    )
    assert code == 0 and "no pair reaches" in said


def test_a_plan_needs_one_target(answer):
    with pytest.raises(ConfigError, match=r"sim\.plan\.steps_per_hour=None.*sim\.plan\.hours=48"):
        answer(("mode=plan",))


def test_a_folder_with_a_training_run_is_left_alone(answer, tmp_path):
    (tmp_path / "outputs" / "frozenlake" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="name='frozenlake'.*another name"):
        answer(("mode=simulate",))


@pytest.mark.parametrize("experiment", ["rose_8b", "rose_32b"])
def test_the_paper_s_settings_pass_every_check_with_every_system(tree, experiment):
    names = ",".join(sorted(path.stem for path in (CONF / "sim" / "systems").glob("*.yaml")))
    c = from_dict(
        tree(
            f"+experiment={experiment}",
            f"sim/systems=[{names}]",
            "mode=simulate sim.serving.rate=1.0 sim.serving.args.seconds=60",
        )
    )
    front.check(c, "simulate")
    assert len(c.sim.systems) >= 14


def test_a_cluster_that_borrows_nothing_is_a_point_of_a_sweep(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    c = from_dict(
        tree(
            "mode=simulate +experiment=rose_8b sim.n_serving=0 sim.seeds=[1] sim.steps=1",
            "sim.warmup=0 sim.processes=1 trainer.batch_size=16",
        )
    )
    assert front.main([c], Console(file=open(tmp_path / "said", "w")), "python launch.py ...") == 0


@pytest.mark.slow
def test_neither_mode_needs_torch_or_vllm():
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, rose.front, rose.parts.simulator.study.runs; "
            "print(sorted({'torch', 'vllm', 'mpi4py', 'deepspeed'} & {m.split('.')[0] for m in "
            "sys.modules}))",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]"
