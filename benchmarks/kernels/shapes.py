"""The shapes that the attention kernels are measured on: one list, so that figures of different days compare."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AttentionShape:
    """`batch` rows of `query_tokens` new tokens each, of `context` tokens in all; `cache`: as `--kv-cache-dtype`."""

    batch: int
    query_tokens: int
    context: int
    query_heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    cache: str = "auto"

    @property
    def name(self) -> str:
        """For result lines: b32_c4096_h16_kv8_d128, with the new tokens where they are more than one and not all, and
        with the type of a quantised cache."""
        new = f"_n{self.query_tokens}" if 1 < self.query_tokens < self.context else ""
        heads = f"h{self.query_heads}_kv{self.kv_heads}_d{self.head_dim}"
        cache = "" if self.cache == "auto" else f"_{self.cache}"
        return f"b{self.batch}_c{self.context}{new}_{heads}{cache}"


def _decode(batch: int, context: int, **heads: int) -> AttentionShape:
    return AttentionShape(batch, 1, context, **heads)


def _fresh(batch: int, tokens: int, **heads: int) -> AttentionShape:
    return AttentionShape(batch, tokens, tokens, **heads)


def _all_caches(shapes: list[AttentionShape]) -> list[AttentionShape]:
    """Each shape with each type of cache, one after the other: what is compared is measured side by side."""
    return [replace(shape, cache=cache) for shape in shapes for cache in ("auto", "int8", "fp8")]


DECODE_SHAPES = _all_caches([
    _decode(1, 1024),
    _decode(1, 32768),
    _decode(8, 512),
    _decode(32, 1024),
    _decode(32, 4096),
    _decode(48, 1024),
    _decode(256, 1024),
    _decode(256, 4096),
    _decode(1, 128),
    _decode(1, 1024, query_heads=32),
    _decode(64, 1024, query_heads=32),
])  # fmt: skip
PREFILL_SHAPES = _all_caches([
    _fresh(8, 32),
    _fresh(8, 128),
    _fresh(8, 256),
    _fresh(16, 1024),
    _fresh(4, 4096),
    _fresh(1, 16384),
    AttentionShape(4, 512, 8192),
    _fresh(4, 4096, query_heads=32),
])  # fmt: skip
SMOKE_DECODE_SHAPES = _all_caches([_decode(2, 20, query_heads=2, kv_heads=1, head_dim=64)])
SMOKE_PREFILL_SHAPES = _all_caches([_fresh(2, 20, query_heads=2, kv_heads=1, head_dim=64)])
