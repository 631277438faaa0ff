"""A client that gives the frontend long work, again and again, while others read their streams.

    python -m benchmarks.frontend_load KIND ENDPOINT SOCKET

Started by `benchmarks.frontend --beside KIND`, which ends it. Each kind is one piece of work that takes the frontend
long, done one after another without a pause; each one that is done prints a line on stdout.

    prompts      a text of 100,000 tokens, as a request for one token
    chats        a chat of 2,000 messages with as many tokens, to be rendered and encoded
    tokenize     a text of 100,000 tokens whose ids are the answer
    detokenize   100,000 token ids whose text is the answer
    bodies       a chat request over HTTP with a JSON body of one megabyte
    ids          a completion over HTTP with a body of 11 megabytes of token ids, more than the model takes
    tools        a chat over HTTP with a body of 11 megabytes of tools with tiny schemas
"""

import http.client
import json
import random
import socket
import sys
from collections.abc import Callable
from itertools import count

from frontend.client import Client

TOKENS = 100_000
CHAT_MESSAGES = 2000
BODY_BYTES = 1_000_000
LARGE_BODY_BYTES = 11_000_000
WORDS = (
    "the",
    "sea",
    "is",
    "blue",
    "and",
    "sky",
    "above",
    "it",
    "wide",
    "as",
    "any",
    "harbour",
    "light",
    "that",
    "shines",
)


def text_of(word_count: int, seed: int) -> str:
    """Words that differ from text to text, about a token each."""
    return " ".join(random.Random(seed).choices(WORDS, k=word_count))


def prompts(client: Client, uds: str, number: int) -> None:
    """A long prompt."""
    client.generate(text_of(TOKENS, number), {"max_tokens": 1})


def chats(client: Client, uds: str, number: int) -> None:
    """A long chat."""
    roles = ("user", "assistant")
    texts = [text_of(TOKENS // CHAT_MESSAGES, number + index) for index in range(CHAT_MESSAGES)]
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    client.chat(messages, {"max_tokens": 1})


def tokenize(client: Client, uds: str, number: int) -> None:
    """The ids of a long text."""
    client.tokenize(text_of(TOKENS, number))


def detokenize(client: Client, uds: str, number: int) -> None:
    """The text of many ids."""
    client.detokenize([1000 + (number + index) % 20_000 for index in range(TOKENS)])


def bodies(client: Client, uds: str, number: int) -> None:
    """A long body."""
    text = text_of(BODY_BYTES // 5, number)[:BODY_BYTES]
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 1})
    assert _posted(uds, "/v1/chat/completions", body) == 200


def ids(client: Client, uds: str, number: int) -> None:
    """A body of token ids."""
    body = '{"max_tokens":1,"prompt":[' + "12345," * (LARGE_BODY_BYTES // 6) + "1]}"
    assert 400 <= _posted(uds, "/v1/completions", body) < 500


def tools(client: Client, uds: str, number: int) -> None:
    """A body of many small objects."""
    tool = '{"type":"function","function":{"name":"f","parameters":{"properties":{%s}}}}'
    tool %= ",".join(f'"p{index}":{{"type":"string"}}' for index in range(1000))
    body = '{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"tools":['
    assert _posted(uds, "/v1/chat/completions", body + ",".join([tool] * (LARGE_BODY_BYTES // len(tool))) + "]}") < 500


def _posted(uds: str, path: str, body: str) -> int:
    """The status that a body is answered with."""
    connection = http.client.HTTPConnection("engine")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(uds)
    connection.request("POST", path, body, {"content-type": "application/json"})
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


KINDS: dict[str, Callable[[Client, str, int], None]] = {
    work.__name__: work for work in (prompts, chats, tokenize, detokenize, bodies, ids, tools)
}

OVER_HTTP = ("bodies", "ids", "tools")


def main(kind: str, endpoint: str, uds: str) -> None:
    """Work until somebody ends us."""
    with Client(endpoint, timeout_s=120) as client:
        for number in count():
            KINDS[kind](client, uds, number)
            print(number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
