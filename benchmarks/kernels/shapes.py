"""The shapes that the attention kernels are measured on: one list, so that figures of different days compare."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """`batch` rows of `query_tokens` new tokens each, of `context` tokens in all."""

    batch: int
    query_tokens: int
    context: int
    query_heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def name(self) -> str:
        """For result lines: b32_c4096_h16_kv8_d128, with the new tokens where they are more than one and not all."""
        new = f"_n{self.query_tokens}" if 1 < self.query_tokens < self.context else ""
        heads = f"h{self.query_heads}_kv{self.kv_heads}_d{self.head_dim}"
        return f"b{self.batch}_c{self.context}{new}_{heads}"


def _decode(batch: int, context: int, **heads: int) -> AttentionShape:
    return AttentionShape(batch, 1, context, **heads)


def _fresh(batch: int, tokens: int, **heads: int) -> AttentionShape:
    return AttentionShape(batch, tokens, tokens, **heads)


DECODE_SHAPES = [
    _decode(1, 1024),
    _decode(1, 32768),
    _decode(8, 512),
    _decode(32, 1024),
    _decode(32, 4096),
    _decode(256, 1024),
    _decode(256, 4096),
    _decode(1, 128),
    _decode(1, 1024, query_heads=32),
    _decode(64, 1024, query_heads=32),
]
PREFILL_SHAPES = [
    _fresh(8, 32),
    _fresh(8, 128),
    _fresh(8, 256),
    _fresh(16, 1024),
    _fresh(4, 4096),
    _fresh(1, 16384),
    AttentionShape(4, 512, 8192),
    _fresh(4, 4096, query_heads=32),
]
SMOKE_DECODE_SHAPES = [_decode(2, 20, query_heads=2, kv_heads=1, head_dim=64)]
SMOKE_PREFILL_SHAPES = [_fresh(2, 20, query_heads=2, kv_heads=1, head_dim=64)]
