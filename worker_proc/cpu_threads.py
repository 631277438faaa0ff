"""Chooses how many threads compute a step on the CPU. Used by the CPU's runner.

Threads sleep when they wait long for one another (see `main.py`), and waking one takes tens of microseconds. A small
step, that is, a few tokens through a small model, is hundreds of operations of about that length: one thread is nearly
as fast as two, and leaves the other cores to the other processes. A decode step of the default model at batch 1, on two
cores: 16.9 ms with one thread, 15.3 with two that spin, 24.1 with two that sleep.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from worker_proc.model_config import ModelConfig

SHARED_WORK = 20_000_000
"""Multiplications in a layer's matrix products from which sharing them between threads pays."""


class StepThreads:
    """Chooses between one thread and all that torch was given when this object was made.

    Args:
        step_tokens: tokens that every step counts as; None: its own.
    """

    def __init__(self, config: ModelConfig, step_tokens: int | None = None) -> None:
        self.thread_count, self._step_tokens = torch.get_num_threads(), step_tokens
        self.layer_parameters = layer_parameters(config)

    def count_for(self, token_count: int) -> int:
        """Threads for a step of that many tokens."""
        token_count = self._step_tokens or token_count
        return self.thread_count if token_count * self.layer_parameters >= SHARED_WORK else 1

    @contextmanager
    def step(self, token_count: int) -> Iterator[None]:
        """Torch computes with the step's number of threads inside."""
        torch.set_num_threads(self.count_for(token_count))
        try:
            yield
        finally:
            torch.set_num_threads(self.thread_count)


def layer_parameters(config: ModelConfig) -> int:
    """Weights of one layer's matrix products."""
    attention = config.head_dim * 2 * (config.head_count + config.kv_head_count)
    return config.hidden_size * (attention + 3 * config.intermediate_size)
