"""Messages, episodes, environments and models that tests make, in few words."""

import json

import yaml

from rose import config
from rose import protocol as p
from rose.places import CONF
from rose.reward.episode import Episode

# A Llama of two layers, as far as a plan needs it.
LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64}
LLAMA |= {"model_type": "llama"}
LLAMA |= {"intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}


def result(turn, tokens, logprob=-1.0, version=0, finish=p.FinishReason.STOP, **more):
    """A turn whose tokens are alike in log-probability and version."""
    n = len(tokens)
    packed = (p.pack_tokens(tokens), p.pack_floats([logprob] * n), p.pack_tokens([version] * n))
    return p.TurnResult(turn, *packed, finish, **more)


def trajectory(name, tokens=(), mask=(), logprobs=(), versions=(), reward=0.0, **more):
    packed = {"tokens": p.pack_tokens(tokens), "mask": bytes(mask)}
    packed |= {"logprobs": p.pack_floats(logprobs), "versions": p.pack_tokens(versions)}
    plain = {"phase": p.Phase.TRAIN, "success": False, "turns": 1, "response_tokens": sum(mask)}
    group = name.partition(".")[0]
    return p.Trajectory(id=name, group=group, reward=reward, **packed, **plain | more)


def episode(**more):
    plain = {"trajectory": "g0.0", "domain": "d", "seed": 1, "task": {}, "transcript": []}
    plain |= {"reward": 0.0, "success": False, "truncated": False, "turns": 1}
    return Episode(**plain | more)


def tool(name, **properties):
    """The schema of a function with properties of these types, which are all required."""
    of_type = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": of_type, "required": [*properties]}
    function = {"name": name, "description": f"{name} it.", "parameters": parameters}
    return {"type": "function", "function": function}


def environment(name, **args):
    """conf/env/NAME.yaml with these arguments."""
    raw = yaml.safe_load((CONF / "env" / f"{name}.yaml").read_text())
    return config.Env(**(raw | {"args": raw["args"] | args}))


def model_folder(folder, **changes):
    """A model's folder, with files enough to be looked at and none to be loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    (folder / "tokenizer_config.json").write_text("{}")
    # No tensor: 8 bytes say how long the header is, which is {}.
    (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    return folder
