"""Simulated engines with few tokens, slots and blocks, for the tests of each of the scheduler's parts."""

from collections.abc import Callable
from random import Random
from typing import Any

from scheduler_proc.simulation import VOCAB_SIZE, SimulatedEngine
from scheduler_proc.state import Limits


def engines_with(**usual: Any) -> Callable[..., SimulatedEngine]:
    """engine(clock=..., **changes) -> an engine with the usual limits, or others where a test says so."""

    def engine(clock: Callable[[], float] = lambda: 0.0, **changes: Any) -> SimulatedEngine:
        return SimulatedEngine(Limits(**(usual | changes)), clock)

    return engine


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids, the same for the same seed; shorter prompts are starts of longer ones."""
    random = Random(seed)
    return [random.randrange(VOCAB_SIZE) for _ in range(length)]


def watched_lookups(run: SimulatedEngine) -> list[int]:
    """A list that gets the limit of each lookup in the engine's prefix cache from now on."""
    cache, limits = run.core.state.cache, []
    lookup = cache.lookup

    def watched(chain: Any, tokens: Any, limit: int) -> Any:
        limits.append(limit)
        return lookup(chain, tokens, limit)

    cache.lookup = watched
    return limits
