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
from rose.config import ConfigError
from rose.coordinator import replay
from rose.launch import local, plan, resume, slurm, supervise
from rose.launch.layout import layout
from tests import processes
from tests.made import model_folder
from tests.processes import ran
from tests.refusals import refused, table

REPOSITORY = Path(__file__).resolve().parents[2]
MODE = Path(__file__).with_name("simulated")
CONF = REPOSITORY / "conf"


@pytest.mark.parametrize("at", [0, 1, 2])
def test_overrides_may_stand_on_both_sides_of_an_option(tmp_path, at):
    (tmp_path / "env").mkdir()
    mine = "# @package env\nname: frozen_lake\nargs: {size: 5}\n"
    (tmp_path / "env" / "mine.yaml").write_text(mine)
    arguments = ["name=mine", "env=mine"]
    arguments[at:at] = ["--config-dir", str(tmp_path)]
    [tree] = front.compose(CONF, arguments)
    assert (tree["name"], tree["env"]["args"]["size"]) == ("mine", 5)


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
model.snapshot=/x -> model.snapshot=/x: no such key
trainer.stepz=3 -> trainer.stepz=3 | no such key | trainer.steps
trainer.lora.rank=8 -> trainer.lora.rank=8 | trainer.lora is null | +trainer/lora=linear
enve=frozen_lake -> enve=frozen_lake | no such key | env
env=mixture +env@env.members.b=frozen_lake env.members.b.max_turn=6 -> env.members.b.max_turn=6 | no such key | +env.members.b.max_turn=6
env=games scheduler/routing=rollart +scheduler.routing.args.hardware.calculater=H20 -> scheduler.routing.args.hardware.calculater='H20' | no such domain | frozen_lake, calculator
scheduler/routing=rollart +scheduler.routing.args.hardware.calculator=H20 -> scheduler.routing.args.hardware.calculator='H20' | environments are frozen_lake
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
mode=simulate sim/systems=[rose,rsoe] -> sim/systems=rsoe: no such option | did you mean rose | areal, best
mode=simulate "sim.efficiency={compute:0.4}" -> sim.efficiency={compute:0.4} | added with '+sim.efficiency={compute:0.4}'
sim.steps=3 -> sim.steps=3 | mode=simulate or mode=plan
--config-dir MODE +experiment=simulated -> mode='simulate' | command line
mode=simulat -> mode='simulat' | train | simulate, plan
-m mode=train,simulate -> mode='simulate' | one sweep is of one mode
experiment=qwen7b -> +experiment=qwen7b
trainer.steps=abc -> trainer.steps='abc' | int
+experiment=qwen7b rollout.tensor_parallel=3 rollout.workers=1 -> rollout.tensor_parallel=3 | 28 attention
trainer.steps=3 seed=1,2 -> seed=1,2 | add -m | 'seed="1,2"'
"seed=range(1,3)" -> seed=range(1,3) | add -m
-m "seed=range(1,1)" -> seed=range(1,1) | no values
env.args.sizee=3 -> env.args.sizee=3: no such key | +env.args.sizee=3
+env.args.sizee=3 -> env.args.sizee=3 | size, hole_probability, slippery
cluster.env.A=x -> cluster.env.A=x: no such key | +cluster.env.A=x
model.source=folder model.path=/nowhere -> model.path='/nowhere' | no such folder
model.path=/nowhere cluster.dry_run=true -> model.path='/nowhere' | no such folder
model.source=hub -> model.path=None | hub id
+model.recipe.sizee=3 -> model.recipe.sizee=3 | source=tiny has no such argument | size, hole_probability
output_dir=/dev/null/runs -> output_dir='/dev/null/runs' | Not a directory | may write
+rollout.engine_args.block_sise=32 -> rollout.engine_args.block_sise=32 | no such argument | did you mean block_size
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


DOUBTS = """
rollout.temperature=0.7 rollout.top_k=3 -> rollout.top_k=3: tokens that are left out
cluster=slurm cluster/mpi=cray_mpich -> cluster.mpi.join=false (of cray_mpich): serving ranks can't
"""


@pytest.mark.parametrize("overrides, doubts", table(DOUBTS))
def test_doubts_are_warnings_of_the_plan(launch, overrides, doubts):
    code, out, _ = launch("cluster.dry_run=true", *overrides.split())
    assert code == 0 and " ".join(out.split()).count(f"warning: {doubts[0]}") == 1
    plain = launch("cluster.dry_run=true", *overrides.split()[:-1])[1]
    assert f"warning: {doubts[0].partition('=')[0]}" not in plain


def test_a_replay_has_only_the_ranks_it_starts_which_get_whole_paths(launch, tree, tmp_path):
    """In a container ranks may start in another folder."""
    (tmp_path / "saved" / "rollouts").mkdir(parents=True)
    for step in (1, 2):
        replay.save(tmp_path / "saved", step, [])
    (tmp_path / "link").symlink_to("saved")
    given = "rollout.replay=link trainer.steps=2 cluster.slots=2 eval.episodes=0"
    code, out, err = launch(*given.split(), "cluster.dry_run=true")
    assert code == 0 and not err and "frozenlake: 2 ranks, no GPU" in out
    assert f"trajectories saved in {tmp_path / 'saved'}" in out.replace("\n", "")
    assert "environment" not in out and "engines" not in out
    relay = "transfer.relay=http://node:7673 transfer.relay_token_file=token"
    made = checks.check(tree(given, "cluster.dry_run=true", relay)).config
    assert made.rollout.replay == str(tmp_path / "saved")
    assert made.transfer.relay_token_file == str(tmp_path / "token")


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
    for there in ("earlier", "fresh"):
        with pytest.raises(type(error)), front._aside(c, Console()), local.locked(c.run_dir):
            if there == "fresh":
                (c.run_dir / "config.json").write_text("fresh")
            raise error
        assert (c.run_dir / "config.json").read_text() == there


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


ROUTING = "round_robin,least_loaded"


def test_a_sweep_plans_every_point_under_a_name_of_its_own(launch):
    sweep = ("trainer.steps=7", "seed=1,2", f"scheduler/routing={ROUTING}")
    code, out, _ = launch("-m", "cluster.dry_run=true", *sweep)
    points = [f"seed={seed},scheduler.routing={r}" for seed in (1, 2) for r in ROUTING.split(",")]
    assert code == 0 and all(f"frozenlake-{point}: 5 ranks" in out for point in points)
    code, out, _ = launch("-m", "cluster.dry_run=true", "env=glob([calc*,frozen*])")
    assert code == 0 and all(f"env={env}: 5 ranks" in out for env in ("calculator", "frozen_lake"))


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


NAMES = ("config.json", "status/finished.json", "inputs.json")
DAMAGED = [(name, text) for name in NAMES for text in ("", "{", "[1]")]


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
    there = {"cwd": REPOSITORY, "env": os.environ | {"PYTHONUNBUFFERED": unbuffered}}
    ends = {"stdout": writer, "stderr": subprocess.PIPE, "timeout": 120}
    done = subprocess.run([sys.executable, *program, *wanted], **there, **ends)
    os.close(writer)
    # rich has a code of its own.
    assert done.returncode in (1, 128 + signal.SIGPIPE) and done.stderr == b""


@pytest.mark.slow
def test_training_imports_no_simulator_and_who_computes_nothing_no_torch():
    words = (
        "import sys, rose.front, rose.main, rose.coordinator.coordinator, rose.trainer.checkpoint\n"
    )
    words += "import rose.agent.rank, rose.agent.process\n"
    words += "print([m for m in sys.modules if 'rose.parts.simulator' in m or m == 'torch'])"
    done = ran([sys.executable, "-c", words], cwd=CONF.parent, check=True)
    assert done.stdout.strip() == "[]"


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
    # zsh and dash leave the ~ of an argument as it is, and Hydra can't read it.
    assert front.compose(CONF, ["output_dir=~/runs"])[0]["output_dir"] == "/home/me/runs"
