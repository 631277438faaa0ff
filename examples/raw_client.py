"""A client without the SDK: only ZeroMQ and msgpack, following docs/protocol.md.

    python examples/raw_client.py ipc:///run/user/1000/trireme-xyz/client.sock "Why is the sky blue?"

The endpoint is in the line that launch.py prints when it is ready.
"""

import struct
import sys

import msgpack
import zmq

HELLO, GENERATE = 60, 61
WELCOME, DELTAS, FINAL, ERROR_REPLY = 80, 81, 82, 83


def main(endpoint: str, question: str) -> int:
    """Ask one question and print the answer as it comes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(endpoint)

        socket.send(msgpack.packb([HELLO, 4, "raw client"]))
        messages = [{"role": "user", "content": question}]
        params = {"max_tokens": 100, "temperature": 0.7}
        model_defaults, stream, priority, cache_salt, timeout_ms, add_special_tokens = True, True, 0, "", None, None
        options = [model_defaults, stream, priority, cache_salt, timeout_ms, add_special_tokens]
        socket.send(msgpack.packb([GENERATE, "q1", messages, params, *options, {}]))
        while True:
            code, *fields = msgpack.unpackb(socket.recv())
            if code == WELCOME:
                print(f"{fields[1][0]} (protocol version {fields[0]})", file=sys.stderr)
            elif code == DELTAS:
                for _request_id, _sample_index, text, *_ in fields[0]:
                    print(text, end="", flush=True)
            elif code == FINAL:
                return report(fields)
            elif code == ERROR_REPLY:
                print(f"refused: {fields[2]}", file=sys.stderr)
                return 1


def report(final: list) -> int:
    """Print how the answer ended."""
    _request_id, samples, prompt_ids, _prompt_logprobs, _prompt_count, completion_count, cached_count, *_ = final
    ids = struct.unpack(f"<{len(prompt_ids) // 4}i", prompt_ids)
    counts = f"{len(ids)} prompt tokens ({cached_count} cached), {completion_count} out"
    print(f"\n{samples[0][3]}: {counts}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} ENDPOINT QUESTION")
    sys.exit(main(*sys.argv[1:]))
