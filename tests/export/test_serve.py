"""The commands of an export's README serve what the run trained: its tool calls, its template and
its context, on CPUs and on GPUs."""

import json
import shlex
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rose.export import card, serve
from scripts.make_tiny_model import CHAT_TEMPLATE, demonstrations, make_tokenizer
from tests.agent.conftest import SMOLLM2, TRL_TEMPLATES

# A generation prompt that opens a thought, as R1's.
OPENS = SMOLLM2.replace(
    "<|im_start|>assistant\n' }}{% endif %}", "<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
LORA = "+trainer/lora=linear"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """base(template) -> a model's folder with a tokenizer."""
    shown, _ = demonstrations(30, {"size": 4, "hole_probability": 0.2}, 0.5, seed=1)
    tokenizer = make_tokenizer(shown)

    def made(template: str) -> Path:
        folder = tmp_path_factory.mktemp("base")
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return made


def commands(config, folder, adapter=False, out="/a b/out") -> tuple[list[str], list[str], str]:
    """(words of the first command, of the second, both with their notes)."""
    text = serve.commands(config, folder, Path(out), adapter)
    first, second, *_ = text.splitlines()
    return shlex.split(first), shlex.split(second.partition(": ")[2]), text


def options(words: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            values = found[word] = []
        elif found:
            values.append(word)
    return found


def test_the_first_command_is_that_of_the_runs_own_devices(make_config, base):
    folder = base(CHAT_TEMPLATE)
    on_cpus, on_gpus, _ = commands(make_config("name=lakes"), folder)
    assert on_cpus[:3] == ["VLLM_CPU_KVCACHE_SPACE=1", "python", "-m"]
    given = options(on_cpus)
    assert given.pop("--enforce-eager") == [] and given.pop("--model") == ["/a b/out"]
    assert on_gpus[:3] == ["vllm", "serve", "/a b/out"] and options(on_gpus) == given
    expected = {"--served-model-name": ["policy", "lakes"], "--enable-auto-tool-choice": []}
    expected |= {"--dtype": ["float32"], "--max-model-len": ["512"]}
    assert given == expected | {"--tool-call-parser": ["hermes"]}
    shared = ("cluster.gpus=5", "rollout.tensor_parallel=2", "model.dtype=bfloat16")
    on_gpus, on_cpus, _ = commands(make_config(*shared), folder)
    assert on_gpus[0] == "vllm" and on_cpus[1] == "python"
    assert options(on_gpus)["--tensor-parallel-size"] == ["2"]
    assert "--dtype" not in options(on_gpus)


def test_the_tool_parser_is_the_form_that_the_template_writes(make_config, base):
    for template in ((TRL_TEMPLATES / "qwen2_5.jinja").read_text(), SMOLLM2):
        folder = base(template)
        words, _, text = commands(make_config(), folder)
        assert options(words)["--tool-call-parser"] == ["hermes"]
        assert serve.SHOWS_NO_TOOLS not in text, "the export's own template describes them"
        *_, text = commands(make_config(LORA), folder, adapter=True)
        assert (serve.SHOWS_NO_TOOLS in text) == (template == SMOLLM2)


THOUGHTS = [("qwen3", True, ["qwen3"]), (OPENS, True, ["qwen3"])]
THOUGHTS += [("qwen3_instruct_2507", True, None)]  # It writes thoughts, and asks for none.
THOUGHTS += [("qwen3", False, None), ("qwen2_5", True, None)]


@pytest.mark.parametrize("name, marks, parser", THOUGHTS)
def test_thoughts_are_read_where_the_template_asks_for_them(make_config, base, name, marks, parser):
    template = name if name == OPENS else (TRL_TEMPLATES / f"{name}.jinja").read_text()
    folder = base(template)
    if marks:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
        tokenizer.save_pretrained(folder)
    words, _, _ = commands(make_config(), folder)
    assert options(words).get("--reasoning-parser") == parser
    named = make_config("model.reasoning_format=deepseek_r1")
    assert options(commands(named, folder)[0])["--reasoning-parser"] == ["deepseek_r1"]


def test_a_named_form_template_arguments_and_a_long_context_are_served(make_config, base):
    config = make_config(
        "model=qwen3_8b model.chat_template_args={enable_thinking: false}",
        "model.max_context=16384 trainer.micro_batch_tokens=16384 model.reasoning_format=qwen3",
    )
    words, _, _ = commands(config, base(CHAT_TEMPLATE))
    given = options(words)
    assert json.loads(*given["--default-chat-template-kwargs"]) == {"enable_thinking": False}
    assert given["--reasoning-parser"] == ["qwen3"] and given["--max-model-len"] == ["16384"]
    assert words[0] == "VLLM_CPU_KVCACHE_SPACE=3"  # 144 KiB a token


def test_an_adapter_is_served_beside_the_model_that_it_was_trained_beside(make_config, base):
    folder = base(CHAT_TEMPLATE)
    words, _, _ = commands(make_config(LORA, "rollout.temperature=0.7"), folder, adapter=True)
    given = options(words)
    assert given["--model"] == [str(folder)] and given["--lora-modules"] == ["policy=/a b/out"]
    assert json.loads(*given["--override-generation-config"])["temperature"] == 0.7
    commit = "0123456789abcdef0123456789abcdef01234567"
    hub = ("model.source=hub", "model.path=Qwen/Qwen3-0.6B", f"+model.snapshot=/cache/{commit}")
    given = options(commands(make_config(LORA, *hub), folder, adapter=True)[0])
    assert (given["--model"], given["--revision"]) == (["Qwen/Qwen3-0.6B"], [commit])
    assert card.base_of(make_config(*hub)) == "Qwen/Qwen3-0.6B (commit 0123456789ab)"
    assert card._hub_header(make_config(*hub))["base_model"] == "Qwen/Qwen3-0.6B"


def test_a_tokenizer_that_can_not_be_read_is_said(make_config, tmp_path):
    words, _, text = commands(make_config(), tmp_path)
    assert "--tool-call-parser" not in words and "\n# tool calls are not read: " in text


@pytest.mark.slow
def test_vllm_knows_every_option(make_config, base):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    config = make_config(LORA, "model.chat_template_args={a: 1}", "model.reasoning_format=qwen3")
    for adapter in (False, True):
        words, _, _ = commands(config, base(CHAT_TEMPLATE), adapter, "/runs/lr=1e-5,'ß' {0}")
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words[4:])
        assert parsed.tool_call_parser == "hermes" and parsed.enable_auto_tool_choice
        assert parsed.default_chat_template_kwargs == {"a": 1}
        places = [module.path for module in parsed.lora_modules] if adapter else [parsed.model]
        assert places == ["/runs/lr=1e-5,'ß' {0}"]
