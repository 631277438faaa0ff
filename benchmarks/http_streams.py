"""A client that reads many HTTP streams at once, each over a connection of its own, for measurements of the frontend.

It counts chunks and does not decode them, so that one process can read more than the frontend writes. Called by
`frontend`.
"""

import json
import selectors
import socket
import time
from itertools import pairwise
from typing import Any

END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def read_http_streams(port: int, prompt: str, streams: int, token_count: int) -> dict[str, Any]:
    """Start the streams, read them to their end."""
    body = json.dumps({"prompt": prompt, "max_tokens": token_count, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    selector = selectors.DefaultSelector()
    for number in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall((head + body).encode())
        selector.register(connection, selectors.EVENT_READ, number)
    chunk_count = ended = 0
    tails = [b""] * streams
    times_s: list[float] = []
    first_s = last_s = 0.0
    while ended < streams:
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)
            assert data, f"the server has closed a stream after {tails[key.data]!r}"
            if count := data.count(b"data: "):
                chunk_count += count
                last_s = time.monotonic()
                first_s = first_s or last_s
            tail = tails[key.data] = (tails[key.data] + data)[-len(END) :]
            ended += tail == END
            if key.data == 0:
                times_s.append(time.monotonic())
    ended_s = time.monotonic()
    gaps_ms = [(later - sooner) * 1000 for sooner, later in pairwise(times_s)]
    chunk_count -= streams  # the last of each says that it is one
    return {
        "token_count": streams * token_count, "chunk_count": chunk_count, "first_s": first_s, "last_s": last_s,
        "ended_s": ended_s, "gaps_ms": gaps_ms,
    }  # fmt: skip


def free_port() -> int:
    """A TCP port that nobody uses at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
