"""Which policy and which task: a run's folder, an exported model's, and what is refused."""

import asyncio
import json
import shlex
import signal

import pytest

from rose import config as configuration
from rose.agent.envs.frozen_lake import FrozenLake
from rose.config import ConfigError
from rose.parts.play import __main__ as command
from rose.parts.play import source
from rose.parts.play.policy import Policy, rollout_of_one
from rose.transfer.errors import TransferError
from tests.export.conftest import base, published, run  # noqa: F401


@pytest.fixture
def folder(run):  # noqa: F811
    """A run with versions 0 to 3 in its store."""
    return run.run


@pytest.fixture
def exported(tmp_path):
    made = tmp_path / "my modèle ${one}"  # a path of which Hydra would read a part
    made.mkdir()
    shape = {"model_type": "qwen3", "dtype": "float32", "max_position_embeddings": 512}
    (made / "config.json").write_text(json.dumps(shape))
    (made / "tokenizer_config.json").write_text("{}")
    return made


def test_the_newest_version_is_played_unless_another_is_asked_for(folder, tmp_path):
    policy = Policy(source.find(folder, []), 1, tmp_path)
    policy.choose(None)
    assert (policy.version, policy.label) == (3, "after 3 training steps")
    policy.choose(0)
    assert policy.label == "before training"
    policy.choose(1)
    assert policy.label == "after 1 training step"
    with pytest.raises(ConfigError, match=r"--version 7: .* doesn't have it; there are 0, 1, 2, 3"):
        policy.choose(7)
    (young := tmp_path / "young").mkdir()
    (young / "config.json").write_bytes((folder / "config.json").read_bytes())
    policy = Policy(source.find(young, []), 1, tmp_path)
    with pytest.raises(ConfigError, match="no version of the weights yet.*--version 0 plays"):
        policy.choose(None)
    policy.choose(0)


def test_a_checkpoint_counts_where_the_store_has_no_such_version(folder):
    checkpoints = folder / "checkpoints"
    for step in (3, 5):
        (checkpoints / f"step-{step:06d}").mkdir(parents=True)
    (checkpoints / "step-000006.tmp").mkdir()
    saved = source.find(folder, []).saved()
    assert saved[5] == checkpoints / "step-000005" and 6 not in saved
    assert saved[3].parent.name == "weights", "an engine reads the store without a copy"


def test_a_version_that_the_trainer_removes_gives_way_to_the_newest(folder, tmp_path, monkeypatch):
    policy, tried = Policy(source.find(folder, []), 1, tmp_path), []

    async def load(version):
        tried.append(version)
        if version == 3:
            monkeypatch.setattr(policy, "newest", lambda: 4)
            raise TransferError("version 3: removed")

    monkeypatch.setattr(policy, "_load", load)
    policy.choose(None)
    asyncio.run(policy.load())
    assert tried == [3, 4] and policy.label == "after 4 training steps"
    policy.choose(3)
    with pytest.raises(TransferError):  # the user asked for this one
        asyncio.run(policy.load())


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "no such folder; there are .*lakes"),
        ([], "neither a run nor an exported model"),
        (["adapter_config.json"], "is an adapter.*--merge"),
        (["config.json"], "config.json: is damaged"),
    ],
)
def test_folders_that_are_nothing_to_play_are_refused_with_those_that_are(folder, files, words):
    place = folder.with_name("sea")
    if files is not None:
        place.mkdir()
    for name in files or ():
        (place / name).write_text("{")
    with pytest.raises(ConfigError, match=words):
        source.find(place, [])


def test_an_exported_model_plays_the_environment_of_the_command_line(exported):
    found = source.find(exported, ["env=frozen_lake", "env.args.size=6"])
    model = found.config.model
    assert (model.source, model.path) == ("folder", str(exported))
    assert (model.dtype, model.max_context) == ("float32", 512)
    assert found.config.env.args["size"] == 6 and found.model == exported
    longer = source.find(exported, ["+experiment=terminal", "model.max_context=99"])
    assert (longer.config.env.name, longer.config.model.max_context) == ("terminal", 99)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("", "doesn't say what to play; name an environment"),
        ("model.dtype=bfloat16", "doesn't say what to play"),
        ("env=frozen_lke", "frozen_lke.*frozen_lake"),
        ("env=prompts", "env.args.data"),
        ("env=frozen_lake env.max_turn=3", "env.max_turn"),
    ],
)
def test_an_exported_model_needs_an_environment_that_there_is(exported, overrides, words):
    with pytest.raises(ConfigError, match=words):
        source.find(exported, overrides.split())


def test_commands_in_refusals_take_any_path(folder, exported):
    for place, overrides, words in (
        # A run plays its own environments.
        (folder, ["env=calculator"], "rose export {} --out DIR"),
        (exported, [], "rose play {} env=frozen_lake"),
    ):
        odd = place.rename(place.with_name("it's 1"))
        with pytest.raises(ConfigError) as error:
            source.find(odd, overrides)
        assert words.format(shlex.quote(str(odd))) in str(error.value)


def test_a_task_is_the_one_that_the_runs_evaluations_have(make_config):
    from rose.coordinator.control import eval_task

    sums = "+env@eval.sets.sums=calculator +eval.sets.sums.episodes=3"
    config = make_config(f"env=games {sums} +eval.sets.sums.temperature=0.5")
    tasks = [source.held_out(config, number, None) for number in range(9)]
    for task in tasks:
        there = eval_task(config.eval.seed, task.number, config.env.weights)
        assert (task.domain, task.seed) == (there.domain, there.seed)
    assert {task.domain for task in tasks} == {"frozen_lake", "calculator"}
    one = source.held_out(config, 2, "sums")
    assert (one.env.name, one.key) == ("calculator", "eval.sets.sums")
    with pytest.raises(ConfigError, match="--env lake: .* there are frozen_lake, calculator, sums"):
        source.held_out(config, 2, "lake")
    warm = source.with_temperature(config, 0.2)
    assert warm.eval.of("sums")[1] == warm.eval.of("frozen_lake")[1] == 0.2
    assert config.eval.of("sums")[1] == 0.5


def test_an_engine_has_memory_for_a_game_and_drafts_nothing(make_config, tmp_path):
    shape = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = make_config("rollout/draft=group", "model.max_context=2048")
    rollout = rollout_of_one(config, tmp_path)
    # 32 layers of keys and values of 8 heads of 128 float32, for twice 2,048 tokens
    assert rollout.kv_cache_gib == 2 * 32 * 8 * 128 * 4 * 4096 / 2**30
    assert rollout.draft.method == "none" and rollout.stream_interval == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("none", "rose play: none: no such folder; there are agent, model\n"),
        ("any --task -1", "--task -1: must not be negative"),
        ("any --temperature 3", "--temperature 3: must be from 0 to 2"),
        ("any --human --before", "--human --before: with --human no policy plays"),
        ("any --human --version 0", "--human --version"),
        ("any lake", "lake: no KEY=VALUE"),
        ("agent --human", "--human: env.name='agent' runs a program"),
        ("model env=frozen_lake --before", "--before: model is an exported model"),
        ("model env=frozen_lake --version 0", "--version: model is an exported model"),
    ],
)
def test_what_can_not_be_played_is_an_error_and_nothing_stays_behind(
    make_config, exported, tmp_path, arguments, words, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    exported.rename("model")
    (tmp_path / "agent").mkdir()
    agent = make_config("env=agent", "env.args.command=sleep 1")
    configuration.save(agent, tmp_path / "agent" / "config.json")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    try:
        code = command.main(arguments.split())
    except SystemExit as ended:  # argparse's
        code = ended.code
    out, err = capfd.readouterr()
    assert code == 2 and out == "" and words in err
    assert list((tmp_path / "scratch").iterdir()) == []


def test_the_user_plays_a_run_without_an_engine(folder, capfd, monkeypatch):
    lines = iter(["right", "down"])
    monkeypatch.setattr("rose.parts.play.typed.ask", lambda prompt: next(lines, None))
    assert command.main([str(folder), "--human", "--task", "3"]) == 0
    out = capfd.readouterr().out
    assert "held-out task 3, you play" in out and out.count("left wall") >= 1


@pytest.mark.parametrize("method", ["__init__", "reset", "step"])
def test_ctrl_c_while_the_environment_computes_is_no_fault(folder, monkeypatch, capfd, method):
    monkeypatch.setattr("rose.parts.play.typed.ask", lambda prompt: "right")
    monkeypatch.setattr(FrozenLake, method, lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert command.main([str(folder), "--human", "--task", "3"]) == 130
    assert "FrozenLake" not in capfd.readouterr().err
