"""Tiny random models of three architectures, a loop for async tests, and engines that are always
shut down."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch
import yaml

from rose import config
from tests.conftest import compose_tree

CONF = Path(__file__).parents[2] / "conf"
COMMON = {"vocab_size": 263, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
COMMON |= {"initializer_range": 0.2, "eos_token_id": 1, "bos_token_id": None}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
EXTRA = {
    "Qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "Qwen2": {"hidden_size": 128, "tie_word_embeddings": False},
    "Llama": {"head_dim": 32, "tie_word_embeddings": True},
    "Qwen3Moe": {"head_dim": 32, "tie_word_embeddings": False, "norm_topk_prob": True} | MIXTURE,
}


def make_model(architecture: str, seed: int = 0, **more):
    import transformers

    torch.manual_seed(seed)
    sizes = COMMON | EXTRA[architecture] | more
    shape = getattr(transformers, f"{architecture}Config")(**sizes)
    model = getattr(transformers, f"{architecture}ForCausalLM")(shape).float().eval()
    for name, parameter in model.named_parameters():
        # transformers starts biases at zero, which would hide a misplaced one
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """architecture -> folder of a random model."""
    made = {}
    for architecture in EXTRA:
        made[architecture] = tmp_path_factory.mktemp(architecture)
        make_model(architecture).save_pretrained(made[architecture])
    return made


@pytest.fixture(scope="session")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(asyncio.sleep(0.1))
    loop.close()


@pytest.fixture(scope="session")
def wait(loop):
    return loop.run_until_complete


@pytest.fixture(scope="session")
def rollout() -> config.Rollout:
    return msgspec.convert(compose_tree()["rollout"], config.Rollout)


@pytest.fixture(scope="session")
def model_config() -> config.Model:
    made = msgspec.convert(yaml.safe_load((CONF / "model/tiny.yaml").read_text()), config.Model)
    return msgspec.structs.replace(made, max_context=256)


@pytest.fixture(scope="session")
def start_one(loop, folders, rollout, model_config):
    """start_one(architecture, **Engine.start's keywords) -> Engine, which the caller ends."""
    from rose.engine.vllm_engine import Engine

    def start(architecture: str, engine_args=(), tensor_parallel=1, drawn=(), **kwargs) -> Engine:
        given = {
            "engine_args": dict(engine_args),
            "tensor_parallel": tensor_parallel,
            **dict(drawn),
        }
        adapted = msgspec.structs.replace(rollout, **given)
        starting = Engine.start(folders[architecture], adapted, model_config, **kwargs)
        return loop.run_until_complete(starting)

    return start


@pytest.fixture
def start(loop, start_one):
    """As `start_one`, and the engines are ended with the test."""
    engines = []

    def start(*args, **kwargs):
        engines.append(start_one(*args, **kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        loop.run_until_complete(engine.shutdown())


@pytest.fixture(scope="module")
def kept(loop):
    """architecture -> (engine, its checksum): those that `warm` has started."""
    made = {}
    yield made
    for engine, _ in made.values():
        loop.run_until_complete(engine.shutdown())


@pytest.fixture
def warm(loop, start_one, kept):
    """warm(architecture) -> an Engine of default settings with the folder's weights, which other
    tests of the module use, too. A test may load versions into it."""
    used = []

    def warm(architecture: str):
        if architecture not in kept:
            engine = start_one(architecture)
            kept[architecture] = engine, loop.run_until_complete(engine.checksum())
        used.append(architecture)
        return kept[architecture][0]

    async def restored(engine):
        if engine.version != -1:
            await engine.deactivate()
            await engine.activate()
        return await engine.checksum()

    yield warm
    for architecture in used:
        engine, checksum = kept.pop(architecture)
        try:
            assert loop.run_until_complete(restored(engine)) == checksum
        except BaseException:
            loop.run_until_complete(engine.shutdown())
            raise
        kept[architecture] = engine, checksum
