"""The table of all HTTP endpoints, with their bodies and examples: what is routed, and what /openapi.json describes."""

from frontend.http import dashboard, tokens, utilities
from frontend.http.anthropic import MessagesRequest, count_tokens, messages
from frontend.http.chat import chat_completions
from frontend.http.completions import completions
from frontend.http.embeddings import embeddings
from frontend.http.openapi import Endpoint, docs, openapi_json
from frontend.http.profiling import ProfileRequest, start_profile, stop_profile
from frontend.http.requests import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeRequest,
)
from frontend.http.responses import ResponsesRequest, responses

_QUESTION = {"role": "user", "content": "Why is the sky blue?"}
_CHAT = {"messages": [_QUESTION], "max_tokens": 64}

ENDPOINTS = (
    Endpoint("/v1/chat/completions", chat_completions, ChatRequest, _CHAT, streams=True),
    Endpoint(
        "/v1/completions", completions, CompletionRequest, {"prompt": "The sea", "max_tokens": 16}, streams=True
    ),
    Endpoint(
        "/v1/responses", responses, ResponsesRequest,
        {"input": "Why is the sky blue?", "max_output_tokens": 64}, streams=True,
    ),
    Endpoint("/v1/messages", messages, MessagesRequest, _CHAT, streams=True),
    Endpoint("/v1/messages/count_tokens", count_tokens, MessagesRequest, {"messages": [_QUESTION]}),
    Endpoint("/v1/embeddings", embeddings, EmbeddingsRequest, {"input": ["The sea", "The sky"]}),
    Endpoint("/v1/models", utilities.models),
    Endpoint("/v1/models/{model_id:path}", utilities.model),
    Endpoint("/tokenize", tokens.tokenize, TokenizeRequest, {"prompt": "The sea"}),
    Endpoint("/detokenize", tokens.detokenize, DetokenizeRequest, {"tokens": [1, 2, 3]}),
    Endpoint("/health", utilities.health, tells_state=True),
    Endpoint("/ready", utilities.health, tells_state=True),
    Endpoint("/ping", utilities.health, methods=("GET", "POST"), tells_state=True),
    Endpoint("/version", utilities.version),
    Endpoint("/server_info", utilities.server_info),
    Endpoint("/abort_request", utilities.abort_request, AbortRequest, {"request_id": "my-request"}),
    Endpoint("/metrics", utilities.metrics, answer="text/plain"),
    Endpoint("/flush_cache", utilities.flush_cache, methods=("POST",)),
    Endpoint("/start_profile", start_profile, ProfileRequest, {"process": "worker", "steps": 10}, needs_body=False),
    Endpoint("/stop_profile", stop_profile, ProfileRequest, {"process": "worker"}, needs_body=False),
    Endpoint("/dashboard", dashboard.page, answer="text/html"),
    Endpoint("/dashboard/data", dashboard.data),
    Endpoint("/openapi.json", openapi_json),
    Endpoint("/docs", docs, answer="text/html"),
)  # fmt: skip
