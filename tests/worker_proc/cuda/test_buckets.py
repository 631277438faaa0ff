"""Buckets hold their steps, waste little, and are few."""

from random import Random

import pytest

from kernels.prefill_plans import hopper_key_tile
from worker_proc.cuda.buckets import (
    CHUNK,
    DECODE,
    LARGE_TOKENS,
    MIXED,
    Bucket,
    bucket_of,
    chunk_buckets,
    compiled_buckets,
    decode_buckets,
    exact_bucket,
    first_buckets,
    slowest_to_compile,
    start_buckets,
)


@pytest.mark.parametrize("limits", [(1, 16), (3, 64), (256, 8192), (100, 1000), (1024, 2048)])
def test_a_bucket_holds_its_step(limits):
    max_rows, max_tokens = limits
    rng = Random(1)
    seen = set()
    for _ in range(2000):
        rows = rng.randint(1, max_rows)
        chunks = rng.randint(0, rows)
        tokens = rows if chunks == 0 else rng.randint(rows, max_tokens)
        bucket = bucket_of(rows - chunks, chunks, tokens, max_rows=max_rows, max_tokens=max_tokens)
        assert rows <= bucket.rows <= max_rows and tokens <= bucket.tokens <= max_tokens, (rows, chunks, tokens, bucket)
        assert bucket.rows <= bucket.tokens, bucket
        assert bucket.kind == (DECODE if chunks == 0 else CHUNK if chunks == rows else MIXED), (chunks, bucket)
        seen.add(bucket)
    assert len(seen) <= 330, f"{len(seen)} graphs for {limits}"


def test_padding_is_at_most_a_quarter_and_of_large_steps_a_32nd():
    for tokens in range(257, 16385):
        bucket = bucket_of(1, 1, tokens, max_rows=256, max_tokens=32768)
        assert bucket.tokens <= tokens * (33 / 32 if tokens > 4096 else 5 / 4), bucket


def test_long_prompts_are_padded_to_rows_for_which_attention_takes_the_same_tiles():
    """Padded to more rows, these would take the tiles of many short prompts."""
    for rows in (1, 2, 3, 4, 5, 16, 17):
        for tokens in (1024, LARGE_TOKENS - 1, LARGE_TOKENS, 8000):
            bucket = bucket_of(0, rows, tokens, max_rows=256, max_tokens=8192)
            own = hopper_key_tile(bucket.tokens, rows, quantised=False)
            assert hopper_key_tile(bucket.tokens, bucket.rows, quantised=False) == own, bucket


def test_decode_buckets_are_all_that_decoding_needs():
    prepared = decode_buckets(256)
    assert [bucket.rows for bucket in prepared[:6]] == [1, 2, 4, 8, 16, 32]
    assert all(bucket.rows == bucket.tokens for bucket in prepared)
    assert {bucket_of(n, 0, n, max_rows=256, max_tokens=512) for n in range(1, 257)} == set(prepared)


@pytest.mark.parametrize("limits", [(256, 8192), (256, 4096), (1024, 16384), (64, 5000)])
def test_every_step_of_many_tokens_has_a_prepared_bucket_that_holds_it(limits):
    """Its own may need a capture first. So many tokens of padding take a fraction of that."""
    max_rows, max_tokens = limits
    prepared, rng = start_buckets(*limits), Random(4)
    assert len(prepared) <= 210
    for _ in range(2000):
        rows = rng.randint(1, max_rows)
        tokens, chunks = rng.randint(max(rows, 1025), max_tokens), rng.randint(1, rows)
        bucket = bucket_of(rows - chunks, chunks, tokens, max_rows=max_rows, max_tokens=max_tokens)
        holding = [each for each in prepared if each.kind == bucket.kind and each.rows >= bucket.rows]
        assert any(bucket.tokens <= each.tokens <= 1.3 * tokens for each in holding), bucket


def test_one_prompt_and_small_batches_are_prepared():
    prepared = set(chunk_buckets(256, 8192))
    for rows, tokens in ((1, 7), (1, 128), (1, 4000), (8, 1024), (5, 600)):
        bucket = bucket_of(0, rows, tokens, max_rows=256, max_tokens=8192)
        assert bucket in prepared, f"{rows} prompts of {tokens} tokens need {bucket}"


@pytest.mark.parametrize("max_tokens", [512, 3584, 3585, 4000, 4096, 4097, 8192, 10_000])
def test_prompts_as_long_as_a_step_may_be_are_prepared(max_tokens):
    """Also where that is padded to what large steps are padded to, but is less itself."""
    prepared = set(start_buckets(256, max_tokens))
    for decode_rows, chunk_rows in ((0, 1), (0, 4), (0, 9), (9, 1)):
        assert bucket_of(decode_rows, chunk_rows, max_tokens, max_rows=256, max_tokens=max_tokens) in prepared


LIMITS = [(1, 1), (1, 16), (48, 64), (256, 8192), (256, 5000), (1024, 1024), (1024, 32768)]


@pytest.mark.parametrize("limits", LIMITS)
def test_any_step_is_held_by_one_of_the_first_buckets(limits):
    """While nothing else is captured, or its kernels are being compiled, no step may wait for that."""
    max_rows, max_tokens = limits
    first, rng = first_buckets(*limits), Random(5)
    assert len(first) <= 18 and all(bucket.rows <= min(max_rows, bucket.tokens) for bucket in first)
    for _ in range(2000):
        rows = rng.randint(1, max_rows)
        chunks = rng.randint(0, rows)
        tokens = rows if chunks == 0 else rng.randint(rows, max_tokens)
        bucket = bucket_of(rows - chunks, chunks, tokens, max_rows=max_rows, max_tokens=max_tokens)
        holding = [each for each in first if each.kind == bucket.kind]
        assert any(each.rows >= bucket.rows and each.tokens >= bucket.tokens for each in holding), bucket


@pytest.mark.parametrize("limits", LIMITS)
def test_what_comes_first_is_among_what_comes(limits):
    slowest, first = set(slowest_to_compile(*limits)), first_buckets(*limits)
    assert slowest <= set(first) <= set(compiled_buckets(*limits)) and len(slowest) <= 5
    assert start_buckets(*limits)[: len(first)] == first


@pytest.mark.parametrize(
    ("bucket", "ends"),
    [
        (Bucket(CHUNK, 1, 512), True), (Bucket(CHUNK, 1, 448), False), (Bucket(MIXED, 256, 1024), True),
        (Bucket(MIXED, 256, 1000), False), (Bucket(CHUNK, 16, 4096, every_token=True), False),
        (Bucket(DECODE, 1, 1024), False),
    ],
    ids=str,
)  # fmt: skip
def test_passes_end_in_rows_where_these_are_few_beside_many_tokens(bucket, ends):
    assert bucket.ends_in_rows is ends


def test_what_asks_for_every_token_says_so_in_its_bucket():
    for every_token in (False, True):
        padded = bucket_of(1, 2, 700, max_rows=256, max_tokens=8192, every_token=every_token)
        exact = exact_bucket(1, 2, 700, every_token=every_token)
        assert padded == Bucket(MIXED, 16, 768, every_token) and exact == Bucket(MIXED, 3, 700, every_token)


def test_exact_buckets_are_the_step():
    assert exact_bucket(3, 0, 3).kind == DECODE
    bucket = exact_bucket(2, 1, 40)
    assert (bucket.kind, bucket.rows, bucket.tokens) == (MIXED, 3, 40)
