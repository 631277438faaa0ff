"""Measures how soon the blocks of a request are free after its client has gone: streamed or not, at any stage.

    python -m benchmarks.disconnects                   # the embedded model
    python -m benchmarks.disconnects --model tiny      # a tiny random one (from a checkout)

Over HTTP and the client socket. A client goes as a killed process does: its connection is closed, without a word.
*noticed* is the time until the frontend has ended the request, *freed* the time until the scheduler holds no block of
it, or no longer queues it. Both are seen from outside, in figures that are sent every tenth of a second, so `freed` is
too long by up to that. A queued request waits behind others that hold every slot; one that prefills has a long prompt.
Prints one JSON line and appends it to --output.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import zmq

from benchmarks import records
from benchmarks.soak import Engine
from common.client_messages import Generate, StatusReply
from frontend import AsyncClient

SLOTS = 2
IN_THE_WAY = 4
"""Long requests that hold the slots while one is to wait; some of them wait themselves, so that no slot falls free."""
MAX_LEN = 4096
OPTIONS = ("--max-num-seqs", str(SLOTS), "--max-model-len", str(MAX_LEN), "--num-kv-blocks", "1024")
SHORT, LONG = 64, 3072
"""Tokens of a prompt; what is left of the context is the answer."""
FIRST_IDS = range(5, 200)
"""Ids of real tokens, in any vocabulary."""
DEADLINE_S = 20.0
LOOK_INTERVAL_S = 0.004

Leave = Callable[[], object]
"""What a client that goes does."""
CASES = list(itertools.product(("http", "zmq"), ("streamed", "whole"), ("queued", "prefilling", "running")))


def new_prompt(count: int) -> "array[int]":
    """Token ids that no cache knows."""
    return array("i", random.choices(FIRST_IDS, k=count))


def params(prompt: Sequence[int]) -> dict[str, Any]:
    """An answer as long as the context allows."""
    return {"max_tokens": MAX_LEN - len(prompt) - 1, "ignore_eos": True, "temperature": 0.0}


async def ask_over_http(ready: Mapping[str, Any], prompt: "array[int]", *, streamed: bool) -> Leave:
    """A request whose answer nobody reads."""
    address = urlsplit(ready["http"])
    body = json.dumps({"prompt": list(prompt), "stream": streamed, **params(prompt)}).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await writer.drain()

    def leave(_: asyncio.StreamReader = reader) -> None:  # held until then: asyncio closes a connection without one
        writer.close()

    return leave


async def ask_over_zmq(ready: Mapping[str, Any], prompt: "array[int]", *, streamed: bool) -> Leave:
    """The same over the client socket."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(ready["client_endpoint"])
    socket.send(Generate(request_id="1", prompt=prompt, params=params(prompt), stream=streamed).to_wire())

    def leave() -> None:
        socket.close(linger=0)
        context.term()

    return leave


async def state_when(sdk: AsyncClient, holds: Callable[[StatusReply], bool]) -> None:
    """Return once something holds of the engine's state.

    Raises:
        TimeoutError: it does not in DEADLINE_S.
    """
    async with asyncio.timeout(DEADLINE_S):
        while not holds(await sdk.status()):
            await asyncio.sleep(LOOK_INTERVAL_S)


def held_blocks(status: StatusReply) -> int:
    """Blocks that live requests hold."""
    figures = status.figures
    return int(figures["total_block_count"] - figures["free_block_count"] - figures["cached_block_count"])


@contextlib.asynccontextmanager
async def full_slots(sdk: AsyncClient, count: int) -> AsyncIterator[None]:
    """So many requests that go on for as long as the block runs, each begun anew when it ends."""

    async def go_on() -> None:
        while True:
            prompt = new_prompt(SHORT)
            await sdk.generate(prompt, params(prompt))

    tasks = [asyncio.create_task(go_on()) for _ in range(count)]
    await state_when(sdk, lambda status: status.live_count == count and waits(status) == max(0, count - SLOTS))
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await state_when(sdk, lambda status: not status.live_count and not held_blocks(status))


def has_come(status: StatusReply, place: str, queue: int, steps: int) -> bool:
    """Whether a request that was sent when so many waited, after so many steps, is where it should be."""
    if place == "queued":
        return waits(status) > queue
    return held_blocks(status) > 0 and (place == "prefilling" or int(status.figures["steps"]) > steps + 4)


def waits(status: StatusReply) -> int:
    """Requests in the scheduler's queue."""
    return int(status.figures["waiting_count"])


async def one(ready: Mapping[str, Any], sdk: AsyncClient, case: Sequence[str], others: int) -> tuple[float, float]:
    """Seconds from a disconnect until it is noticed, and until nothing is held for it; `others` are under way."""
    door, form, place = case
    ask = ask_over_http if door == "http" else ask_over_zmq
    steps = int((await sdk.status()).figures["steps"])
    leave = await ask(ready, new_prompt(LONG if place == "prefilling" else SHORT), streamed=form == "streamed")
    queue = max(0, others - SLOTS)
    await state_when(sdk, lambda status: has_come(status, place, queue, steps))
    gone_s = time.perf_counter()
    leave()
    await state_when(sdk, lambda status: status.live_count <= others)
    noticed_s = time.perf_counter() - gone_s
    await state_when(sdk, lambda status: waits(status) <= queue if place == "queued" else not held_blocks(status))
    return noticed_s, time.perf_counter() - gone_s


async def measure(ready: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Every case so many times; the metrics of the record.

    Args:
        ready: what the engine said when it was ready; it has `SLOTS` slots.
    """
    found: dict[str, Any] = {}
    async with AsyncClient(ready["client_endpoint"], timeout_s=DEADLINE_S) as sdk:
        for case in sorted(CASES, key=lambda case: case[2]):
            others = IN_THE_WAY if case[2] == "queued" else 0
            async with full_slots(sdk, others):
                pairs = [await one(ready, sdk, case, others) for _ in range(times)]
            found["_".join(case)] = summary(pairs)
    return found | {"longest_ms": max(case["freed_max_ms"] for case in found.values())}


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians and maxima in milliseconds."""
    noticed, freed = zip(*pairs, strict=True)
    return {
        "noticed_p50_ms": round(statistics.median(noticed) * 1000, 1),
        "noticed_max_ms": round(max(noticed) * 1000, 1),
        "freed_p50_ms": round(statistics.median(freed) * 1000, 1),
        "freed_max_ms": round(max(freed) * 1000, 1),
    }


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="as launch.py takes it, or 'tiny'")
    parser.add_argument("--times", type=int, default=20, help="disconnects of each kind")
    parser.add_argument("--output", default=str(records.RESULTS_DIR / "disconnects.jsonl"))
    parser.add_argument("--smoke", action="store_true", help="one of each kind with the tiny model, nothing kept")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.times = "tiny", 1
    with Engine(arguments.model, OPTIONS) as engine:
        metrics = asyncio.run(measure(engine.ready, arguments.times))
    entry = records.record(
        benchmark="disconnects", workload=f"{arguments.times} of each kind", metrics=metrics,
        device=records.processor_name(), options={"engine": list(OPTIONS)}, limit={"longest_ms": 1000},
        model=records.model_label(arguments.model), weights="random" if arguments.model == "tiny" else "real",
    )  # fmt: skip
    records.finish(entry, "" if arguments.smoke else arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
