"""A run's folder with a weight store, as a trainer of two ranks left it, and its base model."""

import copy
import shutil

import pytest

from rose import config as configuration
from rose.export import folder
from rose.observe.metrics import MetricsWriter
from tests.transfer.worlds import World


@pytest.fixture
def base(tmp_path):
    """The model's folder that the run began with, with what hubs have beside the weights."""
    model = tmp_path / "model"
    (model / folder.TEMPLATES).mkdir(parents=True)
    files = {
        "config.json": '{"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "float32"}',
        "generation_config.json": '{"eos_token_id": 2}',
        "tokenizer_config.json": "{}",
        "tokenizer.json": "{}",
        "LICENSE": "free",
        "model.safetensors.index.json": "{}",
    }
    others = ("README.md", "recipe.json", "model-00001-of-00002.safetensors", "training.bin")
    others += ("chat_template.jinja", f"{folder.TEMPLATES}/tools.jinja")
    files |= dict.fromkeys(others, "of the base model")
    for name, text in files.items():
        (model / name).write_text(text)
    return model


def run_folder(tmp_path, base, make_config, *overrides):
    """The folder of a run that began with the model `base`, which has its configuration."""
    lakes = tmp_path / "out" / "lakes"
    lakes.mkdir(parents=True)
    own = ("name=lakes model.source=folder model.dtype=bfloat16", f"model.path={base}")
    config = make_config(f"output_dir={tmp_path / 'out'}", *own, *overrides)
    configuration.save(config, lakes / "config.json")
    return lakes


@pytest.fixture
def run(tmp_path, base, make_config, published):
    """A run's folder with its store, which has versions 0 to 3."""
    lakes = run_folder(tmp_path, base, make_config)
    (lakes / "command.txt").write_text("python launch.py name=lakes 'env=games'\n")
    metrics = MetricsWriter(lakes, tensorboard=False)
    for step, wins in ((0, 4), (2, 12), (3, 16)):
        row = {"kind": "eval", "eval_n": 16, "eval_successes": wins, "eval_reward": wins / 16}
        metrics.write(step, row)
    metrics.close()
    store = lakes / "weights" / "attempt-002"
    shutil.copytree(published.store, store)
    world = copy.copy(published)  # which reads; `trained_on` has one that publishes
    world.run, world.store, world.publishers = lakes, store, None
    return world


def publish_four(store) -> World:
    world = World(store)
    world.weights_of = {}
    for version in range(4):
        if version:
            world.step()
        world.publish(version)
        world.weights_of[version] = dict(world.weights)
    return world


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return publish_four(tmp_path_factory.mktemp("published") / "store")


@pytest.fixture
def trained_on(run):
    """`run`, whose trainer goes on: it can step, publish and tidy."""
    shutil.rmtree(run.store)
    world = publish_four(run.store)
    world.run = run.run
    return world
