"""8-bit KV caches through the real processes: crowded, swapped and shared, tokens stay those of a lone request."""

import pytest

from common.sampling_params import SamplingParams
from frontend import Client
from tests.support.idle import assert_figure_exceeds
from tests.support.server import Server

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * index + salt) % 200 + 10 for index in range(60 + 9 * salt)] for salt in range(6)]
OPTIONS = ["--dtype", "float32", "--block-size", "4", "--num-kv-blocks", "80", "--max-num-batched-tokens", "64",
           "--prefix-cache", "radix", "--preemption", "swap", "--swap-space-bytes", "4Mi"]  # fmt: skip


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_crowded_engine_gives_the_tokens_of_an_empty_one(tiny_model_dir, kv_cache_dtype):
    with (
        Server(tiny_model_dir, *OPTIONS, "--kv-cache-dtype", kv_cache_dtype) as server,
        Client(server.ready["client_endpoint"], timeout_s=60) as client,
    ):
        alone = [list(client.generate(prompt, GREEDY).samples[0].token_ids) for prompt in PROMPTS]
        together = client.generate_batch(PROMPTS, [GREEDY] * len(PROMPTS))
        assert [list(final.samples[0].token_ids) for final in together] == alone
        again = client.generate(PROMPTS[0], GREEDY)
        assert list(again.samples[0].token_ids) == alone[0]
        shared = client.generate(PROMPTS[1], SamplingParams(n=3, temperature=0.0, max_tokens=24, ignore_eos=True))
        assert [list(sample.token_ids) for sample in shared.samples] == [alone[1]] * 3
        assert_figure_exceeds(client, "preemptions", 0)
