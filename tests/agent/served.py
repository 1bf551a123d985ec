"""Chat templates in the styles of public models, and how `vllm serve` renders a request with them:
by its own functions, in this process, without an engine."""

import copy
import json
from types import SimpleNamespace

from .conftest import TRL_TEMPLATES

CHATML = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MISTRAL = """\
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{- raise_exception('call ids have 9 characters') }}{%- endif %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}
{%- endfor %}{{- eos_token }}
{%- endif %}
{%- endfor %}"""
# Tools stand before the last user's message, so each of them rewrites what came before.
MISTRAL_V3 = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- m.content }}{%- for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}
{%- endfor %}{{- eos_token }}
{%- endif %}
{%- endfor %}"""
# The system message stands in the last user's message, so each of them takes it from the one before.
MISTRAL_7B = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '[INST]' + (system + '\\n\\n' if loop.last and system is defined else '') + m.content + '[/INST]' }}
{%- else %}{{- m.content + eos_token }}{%- endif %}
{%- endfor %}"""
# Results are numbered through the whole conversation.
NUMBERED = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- set seen = namespace(results=0) %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'tool' %}{{- seen.results | string + ': ' }}{%- set seen.results = seen.results + 1 %}{%- endif %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# The end of a call's id stands beside its result.
SLICED = NUMBERED.replace("seen.results | string", "m.tool_call_id[-4:]")
# A long conversation has another mark before each user's message.
LENGTH = CHATML.replace(
    "m.role +", "m.role + ('!' if messages | length > 6 and m.role == 'user' else '') +"
)
# What a user says is cut behind a thought's end.
CUTS = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
DEEPSEEK = """\
{{- bos_token }}
{%- if tools %}{{- '## Tools' }}{%- for t in tools %}{{- '\\n' + (t.function | tojson) }}{%- endfor %}{{- '\\n' }}{%- endif %}
{%- for m in messages %}{%- set after_tool = not loop.first and loop.previtem.role == 'tool' %}
{%- if m.role == 'system' %}{{- m.content }}
{%- elif m.role == 'user' %}{{- ('<outputs_end>' if after_tool else '') + '<User>' + m.content }}
{%- elif m.role == 'tool' %}{{- ('' if after_tool else '<outputs_begin>') + '<output>' + m.content + '</output>' }}
{%- else %}{{- ('<outputs_end>' if after_tool else '<Assistant>') + m.content.split('</think>')[-1] }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{- eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<outputs_end>' if messages[-1].role == 'tool' else '<Assistant>' }}{%- endif %}"""
LLAMA3, GEMMA, GPT_OSS, QWEN2_5, QWEN3_CODER = (
    (TRL_TEMPLATES / f"{name}.jinja").read_text()
    for name in ("llama3_1", "gemma3", "gptoss", "qwen2_5", "qwen3_5_nothink")
)

MARKS = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]"]
ENDS = ["<|eot_id|>", "<end_of_turn>", "<|end|>"]  # format of a turn; None: the tokenizer's own


def save(tokenizer, template, folder, more=()):
    """A model's folder with this template, or with several by their names; `more` marks are tokens."""
    own = copy.deepcopy(tokenizer)
    own.bos_token = own.bos_token or "<|endoftext|>"
    marks = [mark for mark in (*MARKS, *ENDS, *more) if mark in template]
    marks += ["<|python_tag|>"] * (ENDS[0] in marks)
    own.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(marks))})
    own.eos_token = next((end for end in ENDS if end in marks), own.eos_token)
    own.chat_template = template
    own.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


class Vllm:
    """Render a request's body as `vllm serve FOLDER` does. Raises what vLLM does."""

    def __init__(self, folder):
        from transformers import AutoTokenizer
        from vllm.tokenizers.hf import get_cached_tokenizer

        self._tokenizer = get_cached_tokenizer(AutoTokenizer.from_pretrained(folder))
        self._config = SimpleNamespace(
            **dict.fromkeys(("tokenizer", "model"), str(folder)),
            **dict.fromkeys(("tokenizer_revision", "revision", "code_revision")),
            **dict.fromkeys(("trust_remote_code", "enable_prompt_embeds"), False),
            hf_config=SimpleNamespace(model_type="llama"),
            multimodal_config=None,
            max_model_len=1 << 20,
        )

    def _tokens(self, messages, tools, params):
        from vllm.renderers.chat_utils import parse_chat_messages
        from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

        form = resolve_chat_template_content_format(
            None, tools, "auto", self._tokenizer, model_config=self._config
        )
        conversation, _, _ = parse_chat_messages(messages, self._config, content_format=form)
        given = params.with_defaults({"tools": tools, "tokenize": False})
        text = safe_apply_chat_template(
            self._config, self._tokenizer, conversation, **given.get_apply_chat_template_kwargs()
        )
        return self._tokenizer.encode(text, add_special_tokens=False)

    def chat(self, body):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        return self._of_chat(ChatCompletionRequest(**copy.deepcopy(body)))

    def _of_chat(self, request):
        tools = None if request.tools is None else [t.model_dump() for t in request.tools]
        return self._tokens(request.messages, tools, request.build_chat_params(None, "auto"))

    def messages(self, body):
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

        request = AnthropicMessagesRequest(**copy.deepcopy(body))
        return self._of_chat(AnthropicServingMessages.to_chat_completion_request(request))

    def responses(self, body):
        from vllm.entrypoints.openai.responses import utils
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

        request = ResponsesRequest(**copy.deepcopy(body))
        tools = utils.construct_tool_dicts(request.tools, request.tool_choice)
        messages = utils.construct_input_messages(
            request_instructions=request.instructions, request_input=request.input
        )
        return self._tokens(messages, tools, request.build_chat_params(None, "auto"))
