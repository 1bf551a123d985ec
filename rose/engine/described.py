"""Description of an engine: what vLLM chose for it, and vLLM's warnings.

When vLLM falls back to a slower implementation, only its log has a warning. `listen` must be called
before vLLM reads its configuration. A forked engine process continues its parent's list.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from rose.files import printable


class _Listener(logging.Handler):
    """Keeps the first warning of each line of vLLM's source."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: dict[tuple[str, int], str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = " ".join(printable(record.getMessage()).split())
        except Exception:  # any error of formatting, as in logging's own handlers
            self.handleError(record)
            return
        self.texts.setdefault((record.pathname, record.lineno), text)


_listener = _Listener()


def listen() -> None:
    """Keep vLLM's warnings from now on; a second call changes nothing."""
    from vllm import logger

    logging.getLogger("vllm").addHandler(_listener)
    configure = logger._configure_vllm_root_logger
    if hasattr(configure, "__wrapped__"):
        return

    # vLLM removes all handlers of its logger when an engine's configuration is made, and again at
    # the start of the engine process.
    @functools.wraps(configure)
    def listening(*args, **kwargs):
        configure(*args, **kwargs)
        logging.getLogger("vllm").addHandler(_listener)

    logger._configure_vllm_root_logger = listening


def lines(config: Any) -> list[str]:
    """Return a line with vLLM's choices for this engine, and a line for each warning. `config` is
    vLLM's config, after it was used to build the model."""
    import vllm

    layers = config.compilation_config.static_forward_context.values()
    backends = {
        layer.get_attn_backend().get_name()
        for layer in layers
        if hasattr(layer, "get_attn_backend")
    }
    asynchronous = config.scheduler_config.async_scheduling
    graphs = str(config.compilation_config.cudagraph_mode).rpartition(".")[2]
    chosen = (
        f"vLLM {vllm.__version__}: model runner {'V2' if config.use_v2_model_runner else 'V1'}",
        f"{'asynchronous' if asynchronous else 'synchronous'} scheduling",
        f"attention by {', '.join(sorted(backends)) or 'no known backend'}",
        f"CUDA graphs {graphs}",
    )
    return ["; ".join(chosen), *_listener.texts.values()]
