"""Tokenizer folders: one byte-level BPE with the chat templates of several families."""

import importlib.util
from pathlib import Path

import pytest

from rose.agent.chat import ChatFormat
from scripts.make_tiny_model import CHAT_TEMPLATE, demonstrations, make_tokenizer

# copies of the models' own
TRL_TEMPLATES = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"

SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

TEMPLATES = {
    "tiny": CHAT_TEMPLATE,
    "smollm2": SMOLLM2,
    "qwen2.5": (TRL_TEMPLATES / "qwen2_5.jinja").read_text(),
    "qwen3": (TRL_TEMPLATES / "qwen3.jinja").read_text(),
}


@pytest.fixture(scope="session")
def tokenizer():
    shown, _ = demonstrations(30, {"size": 4, "hole_probability": 0.2}, 0.5, seed=1)
    return make_tokenizer(shown)


@pytest.fixture(scope="session")
def save_tokenizer(tokenizer, tmp_path_factory):
    """save_tokenizer(template) -> folder."""

    def save(template):
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return save


@pytest.fixture(scope="session")
def chats(save_tokenizer):
    """Name of a model family -> its chat format."""
    return {name: ChatFormat(save_tokenizer(template)) for name, template in TEMPLATES.items()}
