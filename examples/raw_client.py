"""Talks to a running engine without the SDK: ZeroMQ and msgpack are enough (see docs/protocol.md).

python examples/raw_client.py tcp://127.0.0.1:5555 "The sea"
"""

import sys

import msgpack
import zmq

HELLO, GENERATE = 60, 61
WELCOME, DELTAS, FINAL, ERROR = 80, 81, 82, 83
TIMEOUT_MS = 60_000


def main(endpoint: str, prompt: str) -> int:
    """Stream one answer to stdout; returns the exit code."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = TIMEOUT_MS
        socket.connect(endpoint)
        socket.send(msgpack.packb([HELLO, 1, "raw client"]))
        params = {"max_tokens": 32, "temperature": 0.0}
        # request_id, prompt, params, model_defaults, stream, priority, cache_salt, timeout_ms, add_special_tokens, chat
        socket.send(msgpack.packb([GENERATE, "r1", prompt, params, True, True, 0, "", None, None, {}]))
        while True:
            code, *fields = msgpack.unpackb(socket.recv())
            if code == WELCOME:
                print("talking to", ", ".join(fields[1]), file=sys.stderr)
            elif code == DELTAS:
                for _request_id, _sample, text, *_ in fields[0]:
                    print(text, end="", flush=True)
            elif code == FINAL:
                print()
                return 0
            elif code == ERROR:
                print("error:", fields[2], file=sys.stderr)
                return 1


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} ENDPOINT PROMPT")
    sys.exit(main(sys.argv[1], sys.argv[2]))
