"""Text in, text out: tokenizer, detokenizer, request life cycle, client socket, SDK, `LLM` and the HTTP API.

Imports neither `scheduler_proc` nor `worker_proc`. Importing this package loads what the SDK needs and no more:
`Client`, `AsyncClient` and `SamplingParams` cost pyzmq and msgpack, `LLM` nothing until it is used.
"""

from typing import TYPE_CHECKING, Any

from common.sampling_params import SamplingParams

if TYPE_CHECKING:
    from frontend.async_client import AsyncClient
    from frontend.client import Client
    from frontend.llm import LLM

__all__ = ["LLM", "AsyncClient", "Client", "SamplingParams"]

_HOMES = {"Client": "frontend.client", "AsyncClient": "frontend.async_client", "LLM": "frontend.llm"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
