"""`python launch.py`: a bad word on the command line costs nothing, a good one says what will
run."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from submitit.core.utils import FailedJobError

from rose import checks, front
from rose import config as configuration
from rose.agent.scoring import Scoring
from rose.config import ConfigError
from rose.coordinator import replay
from rose.launch import doubts, local, plan, resume, slurm, supervise
from rose.launch.layout import layout
from rose.trainer import algorithms
from tests import processes
from tests.made import model_folder
from tests.processes import ran
from tests.refusals import refused, table

REPOSITORY = Path(__file__).resolve().parents[2]
MODE = Path(__file__).with_name("simulated")
CONF = REPOSITORY / "conf"


def test_stale_data_needs_a_correction_for_its_age(make_config):
    def found(*overrides, corrects=False, staleness=4):
        return doubts.stale(make_config(*overrides), staleness, corrects)

    assert found("algorithm=grpo") == () and found("algorithm=decoupled_ppo", corrects=True) == ()
    bare = ("algorithm=grpo", "algorithm.importance_cap=null")
    assert found(*bare, staleness=0) == ()
    words = ["name='bounded_staleness' trains on data up to 4 versions old, and nothing corrects"]
    with refused([*words, "importance_cap=null; take algorithm=decoupled_ppo, or"]):
        found(*bare, "scheduler/batching=bounded_staleness")
    [doubt] = found(*bare, "scheduler/batching=one_step_off", staleness=1)
    assert "up to 1 versions old" in doubt  # veRL's recipe trains so: it may


@pytest.mark.parametrize("at", [0, 1, 2])
def test_overrides_may_stand_on_both_sides_of_an_option(tmp_path, at):
    (tmp_path / "env").mkdir()
    mine = "# @package env\nname: frozen_lake\nargs: {size: 5}\n"
    (tmp_path / "env" / "mine.yaml").write_text(mine)
    arguments = ["name=mine", "env=mine"]
    arguments[at:at] = ["--config-dir", str(tmp_path)]
    [tree] = front.compose(CONF, arguments)
    assert (tree["name"], tree["env"]["args"]["size"]) == ("mine", 5)


WITHOUT_REWARDS_OF_TURNS = """
env=frozen_lake -> env.name='frozen_lake': gives no rewards of turns, which algorithm
env=agent env.args.command=/bin/true -> env.name='agent': | or algorithm=grpo
env=games env.members.frozen_lake.args.shaping=0.5
    -> env.members.calculator.name='calculator': gives no rewards of turns
env.args.shaping=0.5 reward=function reward.args.path=os:getcwd
    -> reward.name='function': replaces | reward=sum with a part {name: environment}
"""


@pytest.mark.parametrize("overrides, words", table(WITHOUT_REWARDS_OF_TURNS))
def test_an_algorithm_of_turns_needs_rewards_of_turns(make_config, overrides, words):
    with refused(words):
        checks.check_turn_rewards(make_config("algorithm=turn_grpo", overrides))


def test_rewards_of_turns_may_be_part_of_a_sum(make_config):
    checks.check_turn_rewards(make_config("algorithm=turn_grpo", "env.args.shaping=0.5"))
    parts = "{own: {name: environment, weight: 0.5}, more: {name: function, args: {path: 'a:b'}}}"
    given = "algorithm=turn_grpo env.args.shaping=1 reward=sum"
    summed = make_config(given, f"reward.args.parts={parts}")
    checks.check_turn_rewards(summed)
    scoring = Scoring(summed.reward, [1], lambda *_: None)
    # half of the environment's, and the function's 2 at the end
    assert scoring.turn_rewards([1.0, 0.0, 0.5], 2.75) == [0.5, 0.0, 2.25]
    replaced = make_config("reward=function").reward
    assert Scoring(replaced, [1], lambda *_: None).turn_rewards([1.0, 0.0], 3.0) == []


BOUNDLESS = """
algorithm.importance_floor=0.5 -> importance_floor=0.5: needs | above it, which is 0.4
algorithm.importance_floor=0.5 algorithm.importance_cap=null -> which is null
algorithm.importance_level=sequence algorithm.importance_cap=null
    -> importance_level=sequence: has no effect
"""


@pytest.mark.parametrize("changed, words", table(BOUNDLESS))
def test_bounds_of_importance_weights_that_bound_nothing_are_refused(make_config, changed, words):
    cap = "algorithm.importance_cap=0.4"
    with refused(words):
        doubts.check_importance(make_config(cap, changed))
    for bounds in ("algorithm.importance_level=sequence", "algorithm.importance_floor=0.2"):
        doubts.check_importance(make_config(cap, bounds))


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
{DAPO} algorithm.args.max_response_tokens=512 -> no trajectory of env reaches
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
{DAPO} algorithm.args.overlong_buffer=0 -> punish
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


def test_clips_of_ratios_to_the_engines_policy_are_no_doubt(make_config):
    """Ratios to the engine's policy can differ from 1 even in a step's first update."""
    assert doubts.unclipped(make_config("algorithm=dapo"), recomputes=False) == ()


def test_hybrid_engines_need_a_policy_that_says_when_they_work_also_one_of_others(tree, tmp_path):
    own = tree("rollout.hybrid=1", f"output_dir={tmp_path}")
    own["scheduler"]["provisioning"] = {"name": "rose.policies.plain:Fixed", "args": {}}
    with pytest.raises(ConfigError, match=r"plain:Fixed'.*rollout\.hybrid=1.*wakes_hybrids"):
        checks.check(own)
    rlboost, args = "rose.parts.rivals.rlboost:RlBoost", {"initial_s": 1.0, "minimum_s": 0.0}
    own["scheduler"]["provisioning"] = {"name": rlboost, "args": args}
    checks.check(own)


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """launch("a=b", ...) -> (exit code, stdout, stderr), run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        code = front.main(CONF, list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


# Command lines; MODE is the folder of an experiment that sets the mode.
BAD = """
trainer.stepz=3 -> trainer.stepz=3 | no such key | trainer.steps
trainer.lora.rank=8 -> trainer.lora.rank=8 | trainer.lora is null | +trainer/lora=linear
enve=frozen_lake -> enve=frozen_lake | no such key | env
env=mixture +env@env.members.b=frozen_lake env.members.b.max_turn=6
    -> env.members.b.max_turn=6 | no such key | +env.members.b.max_turn=6
env=games scheduler/routing=rollart +scheduler.routing.args.hardware.calculater=H20
    -> scheduler.routing.args.hardware.calculater='H20' | no such domain | frozen_lake, calculator
scheduler/routing=rollart +scheduler.routing.args.hardware.calculator=H20
    -> scheduler.routing.args.hardware.calculator='H20' | environments are frozen_lake
env=games env.members.calculator.args.largest=0 -> env.members.calculator.args.largest=0 | 1000000
~trainer.stepz -> ~trainer.stepz: no such key | trainer.steps
~trainer.steps=7 -> 'trainer.steps' is 60 and not 7
+trainer.steps=7 -> +trainer.steps=7 | already | write trainer.steps=7
trainer.lr=1e-5 -> trainer.lr=1e-5: no such key | trainer.optimizer.lr
+steps=7 -> steps=7: no such key | trainer.steps
output_dir=~/runs +steps=7 -> steps=7: no such key | trainer.steps
rollout=2 -> rollout=2 | the name of a file | cpu, gpu
"rollout={a: 1}" -> rollout={a: 1} | give each as rollout.KEY=VALUE
rollout=null -> rollout=null | the name of a file | cpu, gpu
rollout/draft=[none,7] -> rollout/draft=[none,7] | not 7 | group, ngram, none
-m rollout=1,2 -> rollout=1,2 | not 1 | cpu, gpu
+experiment=7 -> +experiment=7 | not 7 | qwen7b
+env=calculator -> +env=calculator | has env already | write env=calculator
env@b=calculator -> env@b=calculator | not in the default | +env@b=calculator
-m seed=1,2 trainer.stepz=1,2 -> trainer.stepz=1,2: no such key | trainer.steps
trainer.steps -> trainer.steps=VALUE
name=a=[b -> name=a=[b | can't be read
+experiment=qwen9b -> experiment=qwen9b | no such option | did you mean qwen7b | smollm
env=frozen -> env=frozen | frozen_lake
mode=simulate sim/systems=[rose,rsoe]
    -> sim/systems=rsoe: no such option | did you mean rose | areal, best
mode=simulate "sim.efficiency={compute:0.4}"
    -> sim.efficiency={compute:0.4} | added with '+sim.efficiency={compute:0.4}'
sim.steps=3 -> sim.steps=3 | mode=simulate or mode=plan
--config-dir MODE +experiment=simulated -> mode='simulate' | command line
mode=simulat -> mode='simulat' | train | simulate, plan
-m mode=train,simulate -> mode='simulate' | one sweep is of one mode
experiment=qwen7b -> +experiment=qwen7b
trainer.steps=abc -> trainer.steps='abc' | int
+experiment=qwen7b rollout.tensor_parallel=3 rollout.workers=1
    -> rollout.tensor_parallel=3 | 28 attention
trainer.steps=3 seed=1,2 -> seed=1,2 | add -m | 'seed="1,2"'
"seed=range(1,3)" -> seed=range(1,3) | add -m
-m "seed=range(1,1)" -> seed=range(1,1) | no values
env.args.sizee=3 -> env.args.sizee=3: no such key | +env.args.sizee=3
+env.args.sizee=3 -> env.args.sizee=3 | size, hole_probability, slippery
cluster.env.A=x -> cluster.env.A=x: no such key | +cluster.env.A=x
model.source=folder model.path=/nowhere -> model.path='/nowhere' | no such folder
model.path=/nowhere cluster.dry_run=true -> model.path='/nowhere' | no such folder
model.source=hub -> model.path=None | hub id
+model.recipe.sizee=3
    -> model.recipe.sizee=3 | source=tiny has no such argument | size, hole_probability
output_dir=/dev/null/runs -> output_dir='/dev/null/runs' | Not a directory | may write
+rollout.engine_args.block_sise=32
    -> rollout.engine_args.block_sise=32 | no such argument | did you mean block_size
cluster=gpus cluster.gpus=8 -> cluster.gpus=8 | this machine has
-m seed=1,2 name=x,x -> two points of the sweep
output_dir= -> output_dir='' | a folder, as outputs
"output_dir='$HOME/runs'" -> output_dir='$HOME/runs' | oc.env:HOME
--config-path /tmp -> --config-path | --config-dir adds a folder
--config-path=/tmp -> --config-path=/tmp | --config-dir adds a folder
=5 -> =5: has no key
--trainer.steps=5 -> --trainer.steps=5: write trainer.steps=5
-m "trainer.optimizer.lr=interval(0,1)" -> lr=interval(0,1): a sweep takes values
-m trainer.batch_size=64,63 -> trainer.batch_size=63
"""


@pytest.mark.parametrize("command, words", table(BAD))
def test_bad_configuration_is_one_message_and_code_2_and_nothing_is_written(
    launch, tmp_path, command, words
):
    code, out, err = launch(*shlex.split(command.replace("MODE", str(MODE))))
    assert code == 2 and not out
    assert err.startswith("bad configuration: ") and "Traceback" not in err
    assert all(word in err for word in words), err
    assert not list(tmp_path.iterdir())


def test_a_key_that_the_launcher_alone_sets_is_not_proposed_for_itself(launch):
    code, _, err = launch("model.snapshot=/x")
    assert code == 2 and "model.snapshot=/x: no such key" in err
    assert "did you mean model.snapshot" not in err


def test_a_tracker_that_is_not_installed_is_refused(launch, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as find_spec sees a package that isn't there
    code, out, err = launch("observe.wandb.project=lakes")
    assert code == 2 and not out and not list(tmp_path.iterdir())
    assert "observe.wandb.project='lakes': the package wandb is not installed" in err


def test_an_affinity_names_members_of_the_mixture(launch):
    mixture = "env=mixture +env@env.members.small=frozen_lake +env.members.small.weight=1 "
    mixture += "+env@env.members.large=frozen_lake +env.members.large.weight=1 "
    mixture += "env.members.large.args.size=6 scheduler/routing=rollart cluster.dry_run=true"
    code, out, err = launch(*mixture.split(), "+scheduler.routing.args.hardware.large=H20")
    assert code == 0 and "trainer" in out, err


def test_doubts_are_warnings_of_the_plan(launch):
    code, out, _ = launch("cluster.dry_run=true", "rollout.temperature=0.7", "rollout.top_k=3")
    assert code == 0
    assert "warning: rollout.top_k=3: tokens that are left out" in " ".join(out.split())
    # Where the model isn't in the cache yet, there is a warning of its memory.
    assert "warning: rollout" not in launch("cluster.dry_run=true")[1]


def test_a_run_that_no_rank_can_join_says_so_in_one_line(launch):
    code, out, err = launch("cluster=slurm", "cluster/mpi=cray_mpich", "cluster.dry_run=true")
    assert code == 0 and not err
    # Where the model isn't in the cache yet, there is one more, of its memory.
    [line] = [line for line in out.splitlines() if "warning: cluster.mpi.join" in line]
    assert "cluster.mpi.join=false (of cray_mpich): serving ranks can't join" in line
    assert "cluster.mpi.join" not in launch("cluster=slurm", "cluster.dry_run=true")[1]


def test_what_ranks_read_has_its_whole_path(tree, tmp_path, monkeypatch):
    """In a container ranks may start in another folder."""
    (tmp_path / "saved" / "rollouts").mkdir(parents=True)
    for step in (1, 2):
        replay.save(tmp_path / "saved", step, [])
    (tmp_path / "link").symlink_to("saved")
    monkeypatch.chdir(tmp_path)
    relay = "transfer.relay=http://node:7673 transfer.relay_token_file=token"
    given = tree("rollout.replay=link trainer.steps=2 cluster.dry_run=true", relay)
    made = checks.check(given).config
    assert made.rollout.replay == str(tmp_path / "saved")
    assert made.transfer.relay_token_file == str(tmp_path / "token")


def test_the_plan_of_a_replay_has_only_the_ranks_it_starts(launch, tmp_path):
    (tmp_path / "earlier" / "rollouts").mkdir(parents=True)
    for step in (1, 2):
        replay.save(tmp_path / "earlier", step, [])
    given = "rollout.replay=earlier trainer.steps=2 cluster.slots=2 eval.episodes=0"
    code, out, err = launch(*given.split(), "cluster.dry_run=true")
    assert code == 0 and not err and "frozenlake: 2 ranks, no GPU" in out
    assert f"trajectories saved in {tmp_path / 'earlier'}" in out.replace("\n", "")
    assert "environment" not in out and "engines" not in out


def test_a_failure_is_printed_as_it_stands_whatever_brackets_its_log_has(
    launch, monkeypatch, make_config, capsys
):
    """What a rank's log holds is no rich markup: `[/usr/bin]` would raise, `[red]` would vanish."""
    words = "rank 2 failed\n  [/usr/lib] [red]list[int] " + "x" * 300
    monkeypatch.setattr(front.local, "start", lambda *_: None)
    monkeypatch.setattr(front.processes, "adopt_orphans", lambda: None)
    monkeypatch.setattr(supervise.Job, "wait", lambda _: supervise.Outcome(words))
    c = make_config("observe.trace=false", "observe.report=false", "observe.terminal=false")
    c.run_dir.mkdir(parents=True)
    assert front._run(c, plan.make(c, None), Console()) == 1
    assert capsys.readouterr().err == f"frozenlake failed: {words}\n"


def test_a_run_whose_job_nobody_can_tell_of_is_not_launched_a_second_time(make_config, monkeypatch):
    def unknown(job):
        raise RuntimeError("squeue failed: Unable to contact slurm controller")

    c = make_config("cluster=slurm")
    monkeypatch.setattr(front.state, "submitted", lambda run_dir: "7")
    monkeypatch.setattr(front.state, "is_active", unknown)
    with pytest.raises(ConfigError, match="does not report.*: squeue failed.*try again"):
        front.launch(SimpleNamespace(config=c), Console(), "python launch.py")


@pytest.mark.parametrize("error", [ConfigError("refused"), KeyboardInterrupt(signal.SIGINT)])
def test_an_earlier_run_comes_back_where_a_fresh_one_never_began(make_config, tmp_path, error):
    c = make_config("fresh=true", f"output_dir={tmp_path}")
    c.run_dir.mkdir(parents=True)
    (c.run_dir / "config.json").write_text("earlier")
    with pytest.raises(type(error)), front._aside(c, Console()), local.locked(c.run_dir):
        raise error
    assert (c.run_dir / "config.json").read_text() == "earlier"
    with pytest.raises(type(error)), front._aside(c, Console()), local.locked(c.run_dir):
        (c.run_dir / "config.json").write_text("fresh")
        raise error
    assert (c.run_dir / "config.json").read_text() == "fresh"


@pytest.mark.parametrize("begun", [False, True])
def test_a_job_that_sbatch_refuses_leaves_only_a_run_that_had_begun(
    make_config, tmp_path, monkeypatch, begun
):
    def refuse(*_):
        raise FailedJobError("sbatch: error: invalid partition specified")

    monkeypatch.setattr(slurm.Executor, "submit", refuse)
    c = make_config("cluster=slurm", f"output_dir={tmp_path}")
    with pytest.raises(ConfigError, match="sbatch refused"), local.locked(c.run_dir):
        if begun:
            resume.mark_finished(c.run_dir, 1)
        (c.run_dir / "command.txt").touch()
        slurm.submit(c, layout(c), Console())
    assert c.run_dir.exists() == begun
    assert not begun or (c.run_dir / "command.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_is_made_ends_launcher_and_recipe(tmp_path, number):
    """Real: scripts/make_tiny_model.py imports torch for seconds, which is when it is ended."""
    env = os.environ | {"ROSE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(REPOSITORY / "launch.py"), "name=x"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launcher = subprocess.Popen(command, cwd=tmp_path, env=env, **output)

    def makes():
        assert launcher.poll() is None, launcher.communicate()
        found = processes.children(launcher.pid)
        return [each for each in found if "make_tiny_model.py" in " ".join(processes.words(each))]

    try:
        recipe = processes.until(makes, "the recipe")
        launcher.send_signal(number)
        out, _ = launcher.communicate(timeout=600)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + number
    assert "Traceback" not in out and f"ended by {signal.Signals(number).name}" in out
    left = processes.left(lambda: filter(processes.alive, recipe))
    assert not left, "the recipe outlived its launcher"
    assert not (tmp_path / "outputs" / "x" / "logs").exists()


def test_a_sweep_plans_every_point_under_a_name_of_its_own(launch):
    sweep = ("seed=1,2", "scheduler/routing=round_robin,least_loaded")
    code, out, _ = launch("-m", "cluster.dry_run=true", "trainer.steps=7", *sweep)
    assert code == 0
    for seed in (1, 2):
        for routing in ("round_robin", "least_loaded"):
            assert f"frozenlake-seed={seed},scheduler.routing={routing}: 5 ranks" in out
    code, out, _ = launch("-m", "cluster.dry_run=true", "env=glob([calc*,frozen*])")
    assert code == 0
    for env in ("calculator", "frozen_lake"):
        assert f"env={env}: 5 ranks" in out


@pytest.fixture
def earlier(launch, make_config):
    """The default run, as an earlier launch has left its configuration."""
    c = make_config()
    c.run_dir.mkdir(parents=True)
    configuration.save(c, c.run_dir / "config.json")
    return c


def test_a_finished_run_prints_its_table_again_and_how_a_stopped_one_goes_on(launch, earlier):
    resume.mark_finished(earlier.run_dir, earlier.trainer.steps)
    (earlier.run_dir / "metrics.jsonl").touch()
    for fewer in ((), ("trainer.steps=1",)):
        code, out, _ = launch(*fewer)
        assert code == 0 and f"is finished ({earlier.trainer.steps} steps)" in out
    resume.mark_finished(earlier.run_dir, 12, earlier)
    code, out, _ = launch()
    assert code == 0 and "is finished (eval.stop, step 12)" in out
    assert "another eval.stop.patience trains on" in out
    assert not (earlier.run_dir / "logs").exists(), "it was started again"


DAMAGED = [
    (name, text)
    for name in ("config.json", "status/finished.json", "inputs.json")
    for text in ("", "{", "[1]")
]


@pytest.mark.parametrize("name, text", [*DAMAGED, ("status/finished.json", '{"steps": "2"}')])
def test_a_damaged_file_of_a_run_is_named(launch, earlier, name, text):
    (earlier.run_dir / "status").mkdir()
    (earlier.run_dir / name).write_text(text)
    code, _, err = launch("cluster.dry_run=false")
    assert code == 2 and f"{name}: is damaged" in err.replace("\n", " "), err
    assert "Traceback" not in err


def test_a_pending_jobs_model_may_be_named_by_a_relative_path(make_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "models" / "x")
    c = make_config("model.source=folder", "model.path=models/x", "name=pending")
    c.run_dir.mkdir(parents=True)
    configuration.save(c, c.run_dir / "config.json")
    resume.check(c.run_dir / "config.json", c)


def test_a_run_without_its_configuration_is_not_continued(launch, earlier):
    (earlier.run_dir / "config.json").unlink()
    step = earlier.run_dir / "checkpoints" / "step-000002"
    step.mkdir(parents=True)
    (step / "coordinator.json").write_text("{}")
    (step / "trainer.json").write_text("{}")
    code, _, err = launch("seed=2")
    assert code == 2 and "has checkpoints and no config.json" in err


def test_the_run_of_another_configuration_is_not_continued_which_a_dry_run_says(launch, earlier):
    code, _, err = launch("seed=2", "trainer.optimizer.lr=0.5")
    assert code == 2 and "seed: 1 -> 2" in err and "fresh=true" in err
    assert f"trainer.optimizer.lr: {earlier.trainer.optimizer.lr} -> 0.5" in err
    assert json.loads((earlier.run_dir / "config.json").read_text())["seed"] == 1
    code, out, _ = launch("seed=2", "cluster.dry_run=true")
    assert code == 0 and "this will be refused" in out and "seed: 1 -> 2" in out


def test_a_mixture_goes_on_with_the_same_weights_whatever_the_order_of_its_members(tree, tmp_path):
    mixed = tree("env=games")
    stored = tmp_path / "config.json"
    configuration.save(configuration.from_dict(mixed), stored)
    mixed["env"]["members"] = dict(reversed(mixed["env"]["members"].items()))
    mixed["env"]["members"]["calculator"]["step_timeout_s"] = 20.0
    resume.check(stored, configuration.from_dict(mixed))
    mixed["env"]["members"]["calculator"]["weight"] = 2
    with refused(["env.members.calculator.weight: 1.0 -> 2.0"]):
        resume.check(stored, configuration.from_dict(mixed))


def test_without_the_environment_it_says_what_to_do(tmp_path):
    shutil.copy(REPOSITORY / "launch.py", tmp_path)
    shutil.copytree(REPOSITORY / "rose", tmp_path / "rose")
    bare = ran([sys.executable, "-S", "-E", "launch.py"], cwd=tmp_path, timeout=600)
    assert bare.returncode == 2
    assert "is not installed" in bare.stderr and "make train" in bare.stderr


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("program", [["launch.py"], ["-m", "rose"]], ids=" ".join)
@pytest.mark.parametrize("wanted", ["--help", "cluster.dry_run=true"])
def test_what_is_printed_for_a_reader_that_has_left_ends_quietly(program, unbuffered, wanted):
    """As into `head`, which leaves after ten of its hundreds of lines."""
    wanted = ["train", wanted] if program[0] == "-m" and wanted != "--help" else [wanted]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, *program, *wanted],
        stdout=writer,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        timeout=120,
    )
    os.close(writer)
    # rich has a code of its own.
    assert done.returncode in (1, 128 + signal.SIGPIPE) and done.stderr == b""


@pytest.mark.slow
def test_training_imports_no_simulator_and_who_computes_nothing_no_torch():
    words = (
        "import sys, rose.front, rose.main, rose.coordinator.coordinator, rose.trainer.checkpoint; "
        "import rose.agent.rank, rose.agent.process; "
        "print([m for m in sys.modules if 'rose.parts.simulator' in m or m == 'torch'])"
    )
    done = ran([sys.executable, "-c", words], cwd=CONF.parent, check=True)
    assert done.stdout.strip() == "[]"


FRUITLESS = """
algorithm=tree_grpo -> algorithm.name='tree_grpo' | rollout/branch=tree
algorithm=tree_grpo rollout/branch=tree rollout.group_size=4
    -> rollout.branch.ways=[2, 2] | rollout.group_size=4 | one tree
rollout/branch=tree env=agent env.args.function=os:getcwd -> env.name='agent' | rollout/branch=none
"""


@pytest.mark.parametrize("overrides, words", table(FRUITLESS))
def test_trees_are_refused_where_nothing_forks_or_nothing_is_beside_them(
    make_config, overrides, words
):
    c = make_config(overrides)
    needed = getattr(algorithms.build(c.algorithm.name, c.algorithm.args), "trains_segments", False)
    with refused(words):
        checks.check_forks(c, needed)
    checks.check_forks(make_config("rollout/branch=tree"), False)
    checks.check_forks(make_config("rollout/branch=tree", "algorithm=tree_grpo"), True)


def test_points_of_a_sweep_whose_values_are_long_have_names_of_their_own():
    sweep = [f"env.args.data=/{'a' * 140}{n}.jsonl" for n in (1, 2)]
    names = [front.point_name("lake", [point], ["env.args.data"]) for point in sweep]
    assert names[0] != names[1] and {len(name) for name in names} == {front.NAME_LIMIT}
    assert names == [front.point_name("lake", [point], ["env.args.data"]) for point in sweep]


def test_an_output_folder_may_begin_with_the_home_folder(make_config, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert make_config("output_dir=~/runs", "name=lake").run_dir == Path("/home/me/runs/lake")
    assert make_config("output_dir=/mnt/c$/runs").run_dir.parent == Path("/mnt/c$/runs")
    with pytest.raises(ConfigError, match="output_dir='\\$HOME/runs': a folder"):
        make_config("output_dir=$HOME/runs")


def test_a_home_folder_is_found_where_the_shell_leaves_its_sign(monkeypatch):
    """zsh and dash leave the ~ of an argument as it is, and Hydra can't read it."""
    monkeypatch.setenv("HOME", "/home/me")
    assert front.compose(CONF, ["output_dir=~/runs"])[0]["output_dir"] == "/home/me/runs"
