"""`mode=simulate` and `mode=plan` are refused with words, or give a table and a page."""

import csv
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rose import front as launcher
from rose.config import ConfigError
from rose.parts.simulator.config import from_dict
from rose.parts.simulator.driver import simulate
from rose.parts.simulator.study import build, front, runs, sizing, table
from tests.processes import ran

REPOSITORY = Path(__file__).resolve().parents[4]
CONF = REPOSITORY / "conf"
SMALL = (
    "model=qwen3_8b trainer.batch_size=16 trainer.micro_batch_tokens=16384 rollout.group_size=4 "
    "sim/systems=[roll_grpo] sim.steps=2 sim.warmup=1 sim.seeds=[1,2] sim.processes=1 "
    "sim.n_serving=2 sim.serving.rate=1.0 sim.serving.args.seconds=60"
)


@pytest.fixture
def answer(tree, tmp_path, monkeypatch):
    """answer("a=b ...", ...) -> (exit code, what was printed), one configuration per text, in an
    empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*points):
        console = Console(width=220, record=True, quiet=False, file=open(tmp_path / "said", "w"))
        trees = [from_dict(tree(SMALL, point)) for point in points]
        return front.main(trees, console, "python launch.py ..."), console.export_text()

    return run


ROUTING = "scheduler.routing.args"
FACTORS = "+sim.environment.factors"
BOXES = "sim.sandboxes.hosts=1 sim.sandboxes"
SEER = "sim/systems=[seer] sim/draft=calls"
ROLLART = "sim/systems=[rollart] scheduler/routing=rollart"
PLAN = "mode=plan sim.plan.steps_per_hour=1"
LENT_H20 = f"sim.pool.cooperative.gpu=H20 scheduler/routing=rollart {ROUTING}.default=H20"
SERVERLESS = "sim/systems=[serverless] sim.systems.serverless.pools=[dedicated]"
DEGREES = "sim.pool.dedicated.tensor_parallel"
ELASTIC = "sim.pool.dedicated.elastic=true"
TAKES_TURNS = f"scheduler/provisioning=elastic sim/systems=[] {ELASTIC}"


@pytest.mark.parametrize(
    "changed, words",
    [
        (f"{ROUTING}.imbalance=-1", "imbalance=-1: share of a worker's capacity, 0 or"),
        (f"{ROUTING}.imbalance=half", f"{ROUTING}.imbalance='half'"),
        ("scheduler.batching.args.max_admitted=null", "scheduler.batching.args.max_admitted=None"),
        ("sim.seeds=[1,1]", "sim.seeds=[1, 1] & different"),
        ("sim.warmup=8", "sim.warmup=8 & below sim.steps=2"),
        ("sim.systems.roll_grpo={pools: [hybrid], stream: true}", "roll_grpo.stream=True & hybrid"),
        ("sim.systems.roll_grpo.pools=[cloud]", "sim.systems.roll_grpo.pools=['cloud']"),
        ("+sim.systems.roll_grpo.scheduler.routing.args.x=1", "roll_grpo.scheduler.routing.args.x"),
        ("sim.pools=[dedicated,cloud]", "cloud & dedicated, cooperative, spot, lend, hybrid"),
        ("sim.pools=[]", "sim.pools=[]: one or more different ones of dedicated, cooperative"),
        ("sim.pools=[dedicated,dedicated]", "sim.pools=['dedicated', 'dedicated']: one or more"),
        ("sim.label=''", "sim.label=''"),
        ("+sim.efficiency.compute=0", "sim.efficiency.compute=0 & above 0"),
        ("+sim.efficiency.computing=0.5", "sim.efficiency.computing=0.5 & compute"),
        (f"{FACTORS}.max_turns=2", "factors.max_turns=2 & parameters are prompt, obs"),
        (f"{FACTORS}.group_share=4", "{'group_share': 4 & shares of one variance"),
        (f"{FACTORS}.hardness=1e6", "hardness of frozen_lake is 1.2e+06: 100 at most"),
        (f"{FACTORS}.tool_s=1e12", "tool_s of frozen_lake is 1e+10: 86400 at most"),
        (f"{FACTORS}.outputs=2", "sim.environment.factors.outputs=2 & output"),
        ("sim.environment.domains=[chess]", "sim.environment.domains='chess' & frozen_lake"),
        ("sim.pool.dedicated.gpu=H900", "sim.pool.dedicated.gpu='H900' & H800"),
        ("sim.pool.dedicated.tensor_parallel=5", "tensor_parallel=5 & 32 attention heads"),
        ("sim.serving.model=gpt", "sim.serving.model='gpt' & qwen2_5_7b"),
        ("sim.serving.trace=/nowhere.csv", "sim.serving.trace='/nowhere.csv'"),
        ("model.shape=null", "model.shape=None & mode=simulate"),
        (f"{SEER} rollout.draft.tokens=3", "rollout.draft.tokens=3 & 2, 4, 8 & replay_drafts"),
        (f"{SEER} sim.draft.siblings=[1,2,3,4,5]", "sim.draft.siblings=[1, 2, 3, 4, 5]: ascending"),
        (f"{SEER} sim.draft.chances=[0.5]", "drafted of tokens=8 & 5 (siblings) of 1 (chances)"),
        (f"{ROLLART} {ROUTING}.default=H20", "default='H20': no pool & have H800"),
        (f"{ROLLART} +{ROUTING}.hardware.chess=H800", "chess='H800': no such domain & frozen_lake"),
        (
            f"{ROLLART} +sim.systems.rollart.{ROUTING}.hardware.frozen_lake=H20",
            "lake='H20': no pool",
        ),
        (f"{BOXES}.cores=[]", "cores=[]: give the cores of at least one host"),
        (f"{BOXES}.memory_gib=1", "sandbox_mib=1280: no host has room"),
        (f"{BOXES}.changes.none.share=0.9", "files, process are 1.212"),
        (
            f"{PLAN} {LENT_H20}",
            "default='H20': no pool & 2 of sim.plan.dedicated and 0 of sim.plan",
        ),
        ("scheduler/provisioning=on_demand", "name='on_demand': asks for workers & lend"),
        (f"{DEGREES}=[]", "tensor_parallel=[]: a list needs a degree, kind=dedicated"),
        (f"{DEGREES}=[1,8] {ELASTIC}", "scheduler/provisioning=elastic, not"),
        (ELASTIC, "elastic=True: needs a list of degrees, not & tensor_parallel=1"),
        (f"{DEGREES}=[3,1]", "tensor_parallel=[3, 1]: & 32 attention heads"),
        (f"{TAKES_TURNS} {DEGREES}=[2,8] sim.pool.dedicated.workers=3", "8 GPUs don't fill the"),
        (f"{TAKES_TURNS} {DEGREES}=[2,5] sim.pool.dedicated.workers=5", "2 GPUs overlap two of 5"),
        (SERVERLESS, "sim.systems.serverless.scheduler.provisioning.name='serverless'"),
        ("mode=plan", "sim.plan.steps_per_hour=None & sim.plan.hours=48"),
        ("sim.pool.spot.link.gbit_s=0", "sim.pool.spot.link.gbit_s=0: expected `float` > 0.0"),
        ("sim.pool.spot.kind=rented", "sim.pool.spot.kind='rented' & dedicated, cooperative"),
        ("+sim.efficiency.compute=high", "compute='high': expected `float`, got"),
        ("sim.systems.roll_grpo.executor=both", "sim.systems.roll_grpo.executor='both'"),
        ("+sim.systems.roll_grpo.scheduler.order.nme=fifo", "roll_grpo.scheduler.order.nme='fifo'"),
    ],
)
def test_a_bad_value_is_named_before_anything_is_simulated(answer, tmp_path, changed, words):
    with pytest.raises(ConfigError) as refused:
        answer(f"mode=simulate {changed}")
    for word in words.split(" & "):
        assert word in str(refused.value)
    assert not (tmp_path / "outputs").exists()


def test_drafts_make_rollouts_shorter_for_the_systems_that_have_them_and_change_no_token(tree):
    def rollout_s(*point):
        c, found = from_dict(tree(SMALL, "mode=simulate", "sim/systems=[seer]", *point)), {}
        for name, system in build.systems(c).items():
            what, scheduler = build.make_spec(c, name, system, 1), build.make_scheduler(c, system)
            steps = simulate(what, scheduler, 1).steps
            took_s = sum(step.training_at - step.began for step in steps)
            found[name] = [step.tokens for step in steps], took_s
        return found

    drafting, without = rollout_s("sim/draft=calls"), rollout_s()
    (made, quick_s), (expected, plain_s) = drafting["seer"], without["seer"]
    assert made == expected and quick_s < plain_s
    assert drafting["this"] == without["this"]


def test_a_trace_file_needs_no_other_key_and_a_limit_too_large_is_refused(answer, tmp_path):
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:{s // 60:02d}:{s % 60:02d},{100 + s},20\n" for s in range(600)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    given = f"mode=simulate sim.serving.trace={trace}"
    more = "sim.seeds=[1] sim.executor=memory_only scheduler/provisioning=static"
    assert answer(f"{given} {more}")[0] == 0
    with pytest.raises(ConfigError, match="sim.serving.trace=.*max_prompt"):
        answer(f"{given} +sim.serving.args.max_prompt=9000000000000000000")
    trace.write_text("".join(["TIMESTAMP,ContextTokens,GeneratedTokens\n", *rows[:2]]))
    with pytest.raises(ConfigError, match="2 requests keep the targets however fast they come"):
        answer(f"{given} sim.serving.rate=null")


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_simulated(answer, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match="output_dir='taken': .*taken"):
        answer("mode=simulate output_dir=taken")
    (tmp_path / "outputs" / "frozenlake" / "checkpoints").mkdir(parents=True)  # a training run's
    with pytest.raises(ConfigError, match="name='frozenlake'.*another name"):
        answer("mode=simulate")
    (tmp_path / "outputs" / "study" / "report.html").mkdir(parents=True)
    with pytest.raises(ConfigError, match="name='study'.*report.html is a folder"):
        answer("mode=simulate name=study")


def test_the_launcher_answers_and_says_where_the_page_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert launcher.main(CONF, ["mode=simulate", *SMALL.split(), "sim.seeds=[1]"]) == 0
    assert "outputs/frozenlake/report.html" in capsys.readouterr().out


def test_a_simulation_prints_a_table_and_leaves_a_page_a_csv_and_a_json(answer, tmp_path):
    code, said = answer("mode=simulate sim.label=mine")
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


def test_a_table_has_columns_of_sandboxes_where_there_are_some(answer, tmp_path):
    """Each system recovers in its own way."""
    _, said = answer("mode=simulate sim.seeds=[1]")
    assert "SLO kept" in said and "Made twice" not in said
    boxes = "sim.sandboxes.hosts=2 sim.sandboxes.mtbf_h=0.02 sim.sandboxes.look_s=0 name=boxes"
    systems = "sim/systems=[recovery_none,recovery_replay,recovery_full]"
    code, said = answer(f"mode=simulate sim.seeds=[1] {systems} {boxes}")
    assert code == 0 and "Made twice" in said and "Hosts lost/step" in said
    rows = csv.DictReader((tmp_path / "outputs" / "boxes" / "result.csv").open())
    found = {row["system"]: row for row in rows}
    assert float(found["recovery_none"]["remade"]) > 0 == float(found["recovery_replay"]["remade"])
    full, classified = (float(found[name]["saved_mb"]) for name in ("recovery_full", "this"))
    assert full > classified > 0 == float(found["recovery_none"]["saved_mb"])


def test_a_sweep_has_one_page_that_compares_its_points(answer, tmp_path):
    names = [f"frozenlake-scheduler.routing={each}" for each in ("round_robin", "least_loaded")]
    chosen = [f"scheduler/routing={name.split('=')[1]} name='{name}'" for name in names]
    chosen[1] += " sim.label=mine"
    code, said = answer(*(f"mode=simulate {each}" for each in chosen))
    page = (tmp_path / "outputs" / "frozenlake-sweep.html").read_text()
    assert code == 0
    for name in names:
        assert (tmp_path / "outputs" / name / "report.html").exists()
        assert f'href="{name}/report.html"' in page
        assert f"<th scope=row>{name.removeprefix('frozenlake-')}</th>" in page
    assert said.count("roll_grpo, seed") == 2  # the rival is the same at both points


def test_points_of_a_sweep_that_have_different_seeds_are_refused(answer):
    with pytest.raises(ConfigError, match=r"name='b': sim.seeds=\[1\], .* sim.seeds=\[1, 2\]"):
        answer("mode=simulate name=a", "mode=simulate name=b sim.seeds=[1]")


def test_a_failure_leaves_the_reports_of_the_points_that_are_complete(
    answer, tmp_path, monkeypatch, capsys
):
    def fails(what, scheduler, seed):
        if what.steps == 3:
            raise ValueError("no compute")
        return simulate(what, scheduler, seed)

    monkeypatch.setattr(runs, "simulate", fails)
    points = [f"mode=simulate sim.seeds=[1] name={name}" for name in ("a", "b sim.steps=3")]
    assert answer(*points)[0] == 1
    assert "roll_grpo, seed 1: no compute" in capsys.readouterr().err
    reports = [path.parent.name for path in (tmp_path / "outputs").glob("*/report.html")]
    assert reports == ["a"] and not list((tmp_path / "outputs").glob("*.html"))


def test_a_report_that_cannot_be_written_costs_no_other(answer, tmp_path, monkeypatch, capsys):
    def fails(folder, *others):
        if folder.name == "a":
            raise OSError("outputs/a: no space left")
        write(folder, *others)

    write = table.write
    monkeypatch.setattr(table, "write", fails)
    assert answer(*(f"mode=simulate sim.seeds=[1] name={name}" for name in "ab"))[0] == 1
    assert "outputs/a: no space left" in capsys.readouterr().err
    assert (tmp_path / "outputs" / "b" / "report.html").exists()
    assert (tmp_path / "outputs" / "a-sweep.html").exists()


@pytest.mark.parametrize(
    "policy, cap",
    [
        ("rose", "n_serving"),
        ("on_demand", "max"),
        ("on_demand scheduler.provisioning.args.min=3", "min"),
        ("serverless", "max"),
    ],
)
def test_a_plan_borrows_as_many_workers_as_a_pair_has(tree, policy, cap):
    chosen = f"sim.pools=[dedicated,lend] scheduler/provisioning={policy}"
    c = from_dict(tree(SMALL, f"{PLAN} {chosen}"))
    lent, alone = (sizing.pair_config(c, 1, n).scheduler.provisioning for n in (2, 0))
    assert lent.args[cap] == 2 and not alone.args.get(cap)


def test_a_plan_advises_the_cheapest_pair_that_reaches_the_target_and_says_why(answer, tmp_path):
    plan = "mode=plan sim.plan.dedicated=[1,2] sim.plan.borrowed=[0,2] sim.seeds=[1]"
    code, said = answer(f"{plan} sim.plan.steps_per_hour=1")
    assert code == 0 and "advised" in said and "1 dedicated + 0 borrowed" in said
    answered = json.loads((tmp_path / "outputs" / "frozenlake" / "result.json").read_text())
    assert answered["advised"]["dedicated_gpus"] == 1 and len(answered["pairs"]) == 4
    assert len(answered["reasons"]) >= 2
    assert "fig-sweep-step" in (tmp_path / "outputs" / "frozenlake" / "report.html").read_text()


def test_a_plan_says_when_nothing_that_was_tried_is_enough(answer):
    plan = "mode=plan sim.plan.dedicated=[1] sim.plan.borrowed=[0] sim.seeds=[1]"
    code, said = answer(f"{plan} sim.plan.steps_per_hour=1e6")
    assert code == 0 and "no pair reaches" in said


@pytest.mark.parametrize("experiment", ["rose_8b", "rose_32b"])
def test_the_paper_s_settings_pass_every_check_with_every_system(tree, experiment):
    names = ",".join(sorted(path.stem for path in (CONF / "sim" / "systems").glob("*.yaml")))
    load = "mode=simulate sim.serving.rate=1.0 sim.serving.args.seconds=10"
    c = from_dict(tree(f"+experiment={experiment} sim/systems=[{names}] {load}"))
    front.check(c, "simulate")
    assert len(c.sim.systems) >= 14


def test_a_cluster_that_borrows_nothing_is_a_point_of_a_sweep(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = "sim.n_serving=0 sim.seeds=[1] sim.steps=1 sim.warmup=0 sim.processes=1"
    c = from_dict(tree(f"mode=simulate +experiment=rose_8b trainer.batch_size=16 {small}"))
    assert front.main([c], Console(file=open(tmp_path / "said", "w")), "python launch.py ...") == 0


@pytest.mark.slow
def test_neither_mode_needs_torch_or_vllm():
    program = "import sys, rose.front, rose.parts.simulator.study.runs; print(*sys.modules)"
    found = ran([sys.executable, "-c", program], cwd=REPOSITORY, check=True).stdout
    loaded = {name.partition(".")[0] for name in found.split()}
    assert "rose" in loaded and not loaded & {"torch", "vllm", "mpi4py", "deepspeed"}
