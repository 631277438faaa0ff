"""Prompts that share starts of all lengths, and the ways in which an engine then shares, copies and swaps blocks."""

from random import Random

SHARING_WAYS = {
    "radix": {"prefix_cache": "radix"},
    "radix-chunked": {"prefix_cache": "radix", "run_ahead": 0, "max_num_batched_tokens": 5},
    "radix-pressure": {"prefix_cache": "radix", "block_count": 60},
    "swap": {"prefix_cache": "radix", "block_count": 45, "host_block_count": 100, "preemption": "swap"},
    "swap-alone": {
        "prefix_cache": "off", "block_count": 45, "host_block_count": 100, "preemption": "swap", "run_ahead": 0
    },
}  # fmt: skip
"""What `MemoryEngine` takes, by name."""


def shared_prompts(vocab_size: int) -> list[list[int]]:
    """Ten prompts of 1 to 58 tokens: starts of one text around multiples of a block of four, most of them continued."""
    random = Random(0)

    def draw(count: int) -> list[int]:
        return [random.randrange(vocab_size) for _ in range(count)]

    base = draw(70)
    return [base[:length] + draw(random.randrange(9)) for length in (1, 4, 5, 8, 13, 30, 31, 32, 33, 50)]
