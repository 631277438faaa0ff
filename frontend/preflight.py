"""The frontend's part of `launch.py check`: its sockets, keys and TLS files, and the tokenizer with its chat template.

By the functions that the frontend starts with, so that both refuse the same with the same words. Runs in the process of
`launcher.check`, which is alone in calling it. Binds the client socket for a moment, and leaves nothing behind.
"""

import importlib.util
from pathlib import Path

from common.config import EngineConfig
from common.findings import Findings
from common.http_socket import file_identity, remove_own
from common.keys import AuthorisedKeys, server_keys
from common.sockets import bind_client_router, new_context
from frontend.connections import Connections
from frontend.engine import sampling_defaults
from frontend.model_pooling import ModelPooling
from frontend.tokenizer import Tokenizer

PROBE = [{"role": "user", "content": "Hi"}]


def look_at_doors(config: EngineConfig) -> Findings:
    """The client socket, its keys, the TLS files and how many may connect."""
    found = Findings()
    server = config.server
    if server.client_keys:
        with found.refusals("keys"):
            folder = Path(server.client_keys)
            server_keys(folder)
            AuthorisedKeys(folder)
            count = len(list((folder / "clients").glob("*.key")))
            clients = "1 client" if count == 1 else f"{count} clients"
            found.ok("keys", f"the engine's own, and those of {clients}; {folder}", client_count=count)
    with found.refusals("client socket"):
        _bind_client_socket(server.client_endpoint)
        where = f"{server.client_endpoint} is free" if server.client_endpoint else "in the run directory"
        found.ok("client socket", where)
    if server.http and server.ssl_certfile:
        with found.refusals("TLS"):
            from frontend.http.tls import check_tls

            check_tls(server)
            found.ok("TLS", f"{server.ssl_certfile} and its key")
    if importlib.util.find_spec("uvloop") is None:
        found.warn("event loop", "uvloop is not installed: streams take asyncio's own loop, which is slower")
    limit = Connections.allowed().limit
    found.ok("connections", f"up to {limit:,} at once, by the limit of open files", connection_limit=limit)
    return found


def look_at_texts(config: EngineConfig, tokenizer_dir: str) -> Findings:
    """Tokenizer, chat template and sampling defaults, from the tokenizer's folder."""
    found = Findings()
    with found.refusals("tokenizer"):
        tokenizer = Tokenizer.load(tokenizer_dir, config.model.chat_template)
        found.ok("tokenizer", f"{tokenizer.vocab_size:,} tokens; an output ends with {_ends(tokenizer)}")
        with found.refusals("sampling"):
            defaults = sampling_defaults(config, tokenizer)
            shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
            found.ok("sampling", f"the model's defaults: {shown}" if shown else "no defaults of the model's")
        _look_at_template(found, tokenizer)
    return found


def look_at_embeddings(config: EngineConfig, model_dir: str) -> Findings:
    """How embeddings would be made."""
    found = Findings()
    named, detected = config.model.pooling, ModelPooling.read(model_dir)
    if named != "auto":
        found.ok("embeddings", f"pooling {named}, as --pooling says")
    elif detected.unsupported:
        found.warn("embeddings", f"refused: {detected.unsupported}; --pooling chooses another way")
    else:
        found.ok("embeddings", f"pooling {detected.mode}" + (f", as {detected.source} says" if detected.source else ""))
    return found


def _ends(tokenizer: Tokenizer) -> str:
    return " or ".join(tokenizer.token_text(token_id) for token_id in tokenizer.end_token_ids) or "its length alone"


def _look_at_template(found: Findings, tokenizer: Tokenizer) -> None:
    if not tokenizer.template_text(with_tools=False):
        found.warn("chat template", "none: chats are refused, completions work; --chat-template FILE gives one")
        return
    try:
        tokenizer.render_chat(PROBE)
    except Exception as error:  # of a template, which may raise anything, or of what renders it
        found.warn("chat template", f"cannot render a chat of one message: {' '.join(str(error).split())}")
    else:
        found.ok("chat template", "renders a chat")


def _bind_client_socket(endpoint: str) -> None:
    """Have the endpoint for a moment; an empty one is in the run directory, which nobody else uses."""
    if not endpoint:
        return
    path = endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else ""
    context = new_context()
    try:
        socket = bind_client_router(context, endpoint)
        identity = file_identity(path)
        socket.close()
    finally:
        context.term()
    remove_own(path, identity)
