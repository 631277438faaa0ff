"""Which attention is timed, and in which ways: workloads, the choices of a launch plan, and what to try next.

A way is a set of options: fields of a kernel's plan, or arguments of its `launch_plan`, that differ from the plan that
ships; no options are that plan. Options that are set together form a choice (a tile with its warps and registers), the
choices for one thing an aspect. First every choice is tried by itself, then those that helped are combined: what two
choices gain together is predicted as the product of what each gained alone.

Knows neither tensors nor processes. Called by tune_attention.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.kernels.decode_chain import mixed_lengths

Options = dict[str, Any]
Aspects = dict[str, list[Options]]

CACHES = ("auto", "int8", "fp8")
MIXED_STEP = 100
"""After so many decode steps of `w1_nano256` its rows are looked at: 658 tokens on average."""

LIBRARY: Options = {"library": "torch"}
"""Torch's own attention, where it computes the same."""

GAIN = 0.995
"""A ratio to the plan that ships below which a choice has helped; a smaller difference is noise."""


@dataclass(frozen=True)
class Workload:
    """Rows of `lengths` tokens; a prefill computes all of them, decoding one a row. `cache`: as `--kv-cache-dtype`."""

    operation: str
    lengths: tuple[int, ...]
    cache: str = "auto"
    query_heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def name(self) -> str:
        """For tables and results: decode_b32_c1024_h16_kv8_d128_int8; rows of different lengths are `mixed`."""
        context = str(self.lengths[0]) if len(set(self.lengths)) == 1 else "mixed"
        heads = f"h{self.query_heads}_kv{self.kv_heads}_d{self.head_dim}"
        cache = "" if self.cache == "auto" else f"_{self.cache}"
        return f"{self.operation}_b{len(self.lengths)}_c{context}_{heads}{cache}"

    @property
    def has_library(self) -> bool:
        """Whether torch computes the same, if from contiguous tensors."""
        return self.operation == "prefill" and self.cache == "auto" and len(set(self.lengths)) == 1

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Workload:
        """The same again."""
        return Workload(**{**values, "lengths": tuple(values["lengths"])})


def workloads() -> list[Workload]:
    """All of them, those first that carry the open goals."""
    decode = (256, 1024), (32, 1024), (64, 256), (1, 512), (8, 200)
    few = (1, 512), (2, 512), (8, 200), (16, 256), (4, 4096)
    prefill = (16, 1024), (2, 4000), (4, 4096), (8, 256)
    found = [Workload("decode", tuple(mixed_lengths(MIXED_STEP)), cache) for cache in CACHES]
    found += [Workload("decode", (context,) * rows, cache) for rows, context in decode for cache in CACHES]
    found += [Workload("few_rows", (context,) * rows, cache) for rows, context in few for cache in CACHES]
    for rows, tokens in prefill:
        for heads in (16, 32) if tokens != 4000 else (16,):
            found += [Workload("prefill", (tokens,) * rows, cache, query_heads=heads) for cache in CACHES]
    return found


def smoke_workloads() -> list[Workload]:
    """One of each operation, small enough for the interpreter."""
    heads = {"query_heads": 2, "kv_heads": 1, "head_dim": 64}
    return [
        Workload("decode", (33, 7, 70), "int8", **heads),
        Workload("few_rows", (20, 7, 33), **heads),
        Workload("prefill", (40, 20), **heads),
    ]


def aspects(workload: Workload, *, hopper: bool) -> Aspects:
    """What can be chosen for a workload; `hopper`: whether the card has the Hopper kernels."""
    if workload.operation == "decode":
        quantised = workload.cache != "auto"
        single_warps = {"kernel": _single_warps(quantised) + _teams(quantised)} if hopper else {}
        return single_warps | _decode_aspects(quantised, hopper)
    if workload.operation == "few_rows":
        return {"kernel": [*_few_rows_choices(), *_few_rows_warps() * hopper]}
    return {"kernel": [*_hopper_choices(workload) * hopper, *_plain_choices(hopper)]}


def _tile(tokens: int, warps: int, registers: int | None, programs: int, stages: int = 3) -> Options:
    """A tile with what has room for it: registers of a thread, and programs that a multiprocessor holds at once."""
    return {
        "tile_tokens": tokens, "num_warps": warps, "max_registers": registers, "programs_per_multiprocessor": programs,
        "num_stages": stages,
    }  # fmt: skip


def _single_warps(quantised: bool) -> list[Options]:
    """The Hopper decode kernel: tile, programs a multiprocessor and stages, which together fill its shared memory. And
    the plain kernel, by the plan that it has where there is no other."""
    sizes = [(16, 12, 3), (32, 8, 3), (32, 6, 4), (64, 4, 3)] if quantised else [(32, 3, 4), (16, 6, 4)]
    names = ("tile_tokens", "programs_per_multiprocessor", "num_stages")
    kernel = {"specialised": True, "num_warps": 1, "max_registers": None, "start_tiles": 2}
    return [*(kernel | dict(zip(names, size, strict=True)) for size in sizes), {"specialised": False}]


def _teams(quantised: bool) -> list[Options]:
    """The Hopper decode kernel of several warps, a beginning costing nothing."""
    wide = [_tile(128, 8, 128, 2), _tile(64, 4, 128, 4), _tile(64, 4, 168, 3, 4), _tile(128, 4, None, 2)]
    sizes = wide if quantised else [_tile(64, 4, None, 2)]
    return [{"specialised": True, "start_tiles": 0} | size for size in sizes]


def _few_rows_choices() -> list[Options]:
    """Programs of several warps, the new token a part of its own or not."""
    sizes = [(True, 4, 64), (False, 4, 64), (True, 2, 64), (True, 4, 32), (False, 4, 32)]
    names = ("is_apart", "num_warps", "tile")
    return [{"single_warps": False} | dict(zip(names, size, strict=True)) for size in sizes]


def _few_rows_warps() -> list[Options]:
    """Programs of one warp, by the cached tokens that one takes."""
    return [{"single_warps": True, "tile": tokens} for tokens in (32, 64, 16)]


def _decode_aspects(quantised: bool, hopper: bool) -> Aspects:
    kernel = {"specialised": False} if hopper else {}
    plain = [
        _tile(64, 4, 168, 3), _tile(64, 4, 128, 4, 2), _tile(64, 8, 128, 2), _tile(64, 4, None, 1, 5),
        _tile(128, 8, None, 1), _tile(32, 4, None, 2, 5), _tile(32, 4, 168, 3, 4), _tile(32, 4, 128, 4),
        _tile(32, 2, None, 4),
    ]  # fmt: skip
    pairs = [
        _tile(128, 4, None, 2), _tile(128, 4, 168, 3), _tile(128, 8, None, 1), _tile(128, 8, 128, 2),
        _tile(64, 4, None, 2), _tile(64, 4, 168, 3), _tile(64, 4, 128, 4), _tile(64, 8, 128, 2), _tile(32, 4, 128, 4),
    ]  # fmt: skip
    return {
        "tile": [kernel | tile for tile in (pairs if quantised else plain)],
        "stages": [{"num_stages": count} for count in (2, 4)],
        "programs": [{"programs_per_multiprocessor": 1}],
        "beginnings": [{"start_tiles": 1 if hopper else 2}],
    }


def _hopper_choices(workload: Workload) -> list[Options]:
    choices: list[Options] = [{"specialised": True, "overlap": workload.cache == "auto"}]
    if workload.cache != "auto":
        return [*choices, {"specialised": True, "fresh": False}]
    return [*choices, {"specialised": True, "key_tile": 64}, {"specialised": True, "key_tile": 128}]


def _plain_choices(hopper: bool) -> list[Options]:
    """Tiles of the plain kernel: rows x keys, warps, stages, registers, in one masked loop or in two."""
    sizes = [
        (64, 64, 4, 2, None, True), (64, 64, 4, 2, None, False), (64, 64, 4, 3, None, True),
        (128, 64, 8, 2, 128, False), (128, 64, 8, 2, None, True), (128, 64, 4, 2, None, True),
        (64, 128, 4, 2, None, True), (64, 32, 4, 3, None, True),
    ]  # fmt: skip
    names = ("tile_rows", "key_tile", "num_warps", "num_stages", "max_registers", "one_loop")
    kernel = {"specialised": False} if hopper else {}
    return [kernel | dict(zip(names, size, strict=True)) for size in sizes]


def key_of(options: Options) -> str:
    """A name by which equal options are equal."""
    return json.dumps(options, sort_keys=True)


def described(options: Options) -> str:
    """Options in a table."""
    if options == LIBRARY:
        return "torch"
    return " ".join(f"{name}={value}" for name, value in options.items()) or "as it ships"


def singles(choices: Aspects) -> list[Options]:
    """Every choice by itself."""
    return [option for options in choices.values() for option in options]


def combinations(choices: Aspects, ratios: Mapping[str, float], most: int) -> list[Options]:
    """The most promising ways that were not tried, `most` at most.

    Args:
        ratios: of the ways tried, by `key_of`: time divided by that of the plan that ships; inf for one that failed.
    """
    predicted: dict[str, tuple[float, Options]] = {}
    for base, ratio in _helpful(ratios):
        for options in choices.values():
            if any(name in base for option in options for name in option):
                continue  # this aspect has been chosen
            for option in options:
                together = base | option
                product = ratio * ratios.get(key_of(option), float("inf"))
                if product < min(ratio, GAIN) and key_of(together) not in ratios:
                    predicted[key_of(together)] = (product, together)
    return [options for _, options in sorted(predicted.values(), key=lambda pair: pair[0])[:most]]


def _helpful(ratios: Mapping[str, float]) -> Iterator[tuple[Options, float]]:
    for key, ratio in ratios.items():
        if ratio < GAIN:
            yield json.loads(key), ratio
