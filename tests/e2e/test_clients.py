"""Many clients at once that stream, abort and walk away: every result is whole, and nothing is left in the engine."""

import asyncio
import random
from collections import Counter

import pytest

from common.sampling_params import SamplingParams
from frontend import AsyncClient, Client
from tests.support.idle import assert_becomes_idle

CLIENT_COUNT = 48
REQUESTS_EACH = 5


@pytest.mark.parametrize("seed", [1])
def test_a_crowd_of_clients_leaves_nothing_behind(server, seed):
    endpoint = server.ready["client_endpoint"]
    reasons = asyncio.run(crowd(endpoint, seed))
    assert {"stop", "length", "abort", "left"} <= {*reasons}, f"seed {seed}: {reasons}"
    with Client(endpoint) as client:
        assert_becomes_idle(client, f"seed {seed}:")


async def crowd(endpoint: str, seed: int) -> Counter:
    """Run all clients; how their requests ended."""
    reasons: Counter = Counter()
    await asyncio.gather(*(one_client(endpoint, random.Random(f"{seed} {n}"), reasons) for n in range(CLIENT_COUNT)))
    return reasons


async def one_client(endpoint: str, choose: random.Random, reasons: Counter) -> None:
    async with AsyncClient(endpoint) as client:
        for _ in range(REQUESTS_EACH):
            prompt = [choose.randrange(2, 300) for _ in range(choose.randint(1, 120))]
            stream = await client.submit(prompt, any_params(choose), stream=choose.random() < 0.7)
            match choose.choice(["read", "read", "read", "read", "read", "read", "abort", "abort", "leave"]):
                case "leave":
                    reasons["left"] += 1
                    return
                case "abort":
                    await stream.abort()
            await read(stream, reasons)


def any_params(choose: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=choose.randint(1, 60),
        n=choose.choice([1, 1, 2]),
        stop=choose.choice([(), ("e",), ("fr", "sea")]),
        logprobs=choose.choice([None, None, 2]),
        temperature=choose.choice([0, 1.0]),
        ignore_eos=choose.random() < 0.5,
    )


async def read(stream, reasons: Counter) -> None:
    parts: dict[int, list[str]] = {}
    async for delta in stream:
        parts.setdefault(delta.sample_index, []).append(delta.text)
    for sample in stream.final.samples:
        reasons[sample.finish_reason] += 1
        if parts:
            assert "".join(parts.get(sample.index, [])) == sample.text
