"""Eight-bit caches in kernels/prefill_attention_hopper.py: the warps that make bfloat16 of what the copy engine brings.

The copying warps bring a tile of stored elements to shared memory as it is, half as many bytes as a plain one. Four
warps turn it into the tile that the computing groups expect, each vector multiplied by its scale, so that those groups
are the same for every cache. A tile of 128 keys meets 128 rows of queries: scaling it here is as many multiplications
as scaling scores and weights would be, two at a time, and not in the warps that the tensor cores wait for.

    x' = bfloat16(q * scale), correctly rounded but for one part in 2^17

Four bytes become two words of two bfloat16 each. int8: a byte's low seven bits are put below the exponent of 128, its
sign below that of 128 or 256, and one taken from the other. FP8 (e4m3): exponent and mantissa moved to bfloat16's
places are the number times 2^-120, subnormals included; the bits of its NaN become 480. The scale, float16, is the sum
of two bfloat16, so two multiplications in pairs round like one by the scale itself. No byte becomes NaN or infinity,
and keys at or past the row's end get the scale 0: what lies there never reaches a product. `kv_format.read_back` makes
the same bits.

Knows the mailbox of kernels/prefill_attention_hopper_copy.py. Called by kernels/prefill_attention_hopper.py alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.kv_quant import INT8
from kernels.launch_gluon import wait_for_inputs
from kernels.prefill_attention_hopper_copy import MAIL_SLOTS, cached_tiles, read_mail

PIECE_ROWS = gl.constexpr(32)
"""Keys that are converted at a time: a whole tile, before and after, is more than the warps' registers hold."""

# Operands of the assembly, of which four elements share a copy: $2 the four stored bytes, $3 to $6 the scale's upper
# part (`_scale_words`), four times the same, $7 to $10 its lower part; $0 and $1 get two bfloat16 each.
_SCALED = """
    mul.rn.bf16x2 high, low, $7;
    fma.rn.bf16x2 $0, low, $3, high;
    mul.rn.bf16x2 high, top, $7;
    fma.rn.bf16x2 $1, top, $3, high;
}"""
INT8_TO_BF16 = gl.constexpr(
    """{
    .reg .b32 low, top, high, sign;
    prmt.b32 low, $2, 0x43434343, 0x4140;
    prmt.b32 top, $2, 0x43434343, 0x4342;
    and.b32 sign, low, 0xff80ff80;
    and.b32 low, low, 0xff7fff7f;
    sub.rn.bf16x2 low, low, sign;
    and.b32 sign, top, 0xff80ff80;
    and.b32 top, top, 0xff7fff7f;
    sub.rn.bf16x2 top, top, sign;"""
    + _SCALED
)
FP8_TO_BF16 = gl.constexpr(
    """{
    .reg .b32 low, top, high, sign, shift;
    mov.b32 shift, 0x7b807b80;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 top, $2, 0, 0x3424;
    and.b32 sign, low, 0x80008000;
    shr.u32 low, low, 4;
    lop3.b32 low, low, 0x07f007f0, sign, 0xea;
    mul.rn.bf16x2 low, low, shift;
    and.b32 sign, top, 0x80008000;
    shr.u32 top, top, 4;
    lop3.b32 top, top, 0x07f007f0, sign, 0xea;
    mul.rn.bf16x2 top, top, shift;"""
    + _SCALED
)


@gluon.jit
def _scale_words(scale):
    """A float16 scale as two bfloat16 that add up to it, each twice in a word."""
    wide = scale.to(gl.float32)
    high = wide.to(gl.bfloat16)
    low = (wide - high.to(gl.float32)).to(gl.bfloat16)
    high_word = high.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    low_word = low.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return high_word | (high_word << 16), low_word | (low_word << 16)


@gluon.jit
def _convert_tile(
    raw, raw_full, raw_empty, phase, tile, full, empty, empty_phase, high_words, low_words, FORMAT: gl.constexpr
):
    """Turn the raw tile [keys, head_dim] into `tile` under its keys' scales; signal both sides."""
    TILE: gl.constexpr = raw.shape[0]
    HEAD_DIM: gl.constexpr = raw.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    mbarrier.wait(raw_full, phase)
    mbarrier.wait(empty, empty_phase)
    for piece in gl.static_range(TILE // PIECE_ROWS):
        stored = raw.slice(piece * PIECE_ROWS, PIECE_ROWS).load(layout)
        high = high_words.slice(piece * PIECE_ROWS, PIECE_ROWS).load(rows)
        low = low_words.slice(piece * PIECE_ROWS, PIECE_ROWS).load(rows)
        scaled = gl.inline_asm_elementwise(
            INT8_TO_BF16 if FORMAT == INT8 else FP8_TO_BF16,
            "=&r,=&r,r,r,r,r,r,r,r,r,r",
            [stored, gl.expand_dims(high, 1), gl.expand_dims(low, 1)],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=4,
        )
        tile.slice(piece * PIECE_ROWS, PIECE_ROWS).store(scaled)
    fence_async_shared()
    mbarrier.arrive(full, count=1)
    mbarrier.arrive(raw_empty, count=1)


@gluon.jit
def _load_scales(scales_ptr, blocks, keys, head, length, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The float16 scales of `keys`, positions of a row; 0 before its first and from its end on."""
    places = (blocks.to(gl.int64) * KV_HEADS + head) * BLOCK_SIZE + keys % BLOCK_SIZE
    return gl.load(scales_ptr + places, mask=(keys >= 0) & (keys < length), other=0.0)


@gluon.jit
def convert(
    tables_ptr, table_stride, key_scales_ptr, value_scales_ptr, raw_keys, raw_values, raw_key_full, raw_key_empty,
    raw_value_full, raw_value_empty, keys, values, key_full, key_empty, value_full, value_empty, words,
    mail, mail_full, mail_empty,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, FORMAT: gl.constexpr, FRESH: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Read the letters and convert their keys and values, tile by tile from the end, until the last letter.

    With FRESH a letter's first stages are filled by the copying warps: they are counted here and passed over.
    """
    TILE: gl.constexpr = keys.shape[1]
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    places = gl.arange(0, TILE, layout=line)
    letter = 0
    filled = 0
    done = 0
    is_work, _, query_count, _, length, head, key_end, table_row = read_mail(mail, mail_full, letter)
    wait_for_inputs(PDL)
    while is_work != 0:
        mbarrier.arrive(mail_empty.index(letter % MAIL_SLOTS), count=1)
        table_ptr = tables_ptr + table_row.to(gl.int64) * table_stride
        last_block = (length - 1) // BLOCK_SIZE
        all_count = (key_end + (TILE - 1)) // TILE
        tile_count = cached_tiles(all_count, length, query_count, TILE, FRESH)
        filled += all_count - tile_count
        # Scales are loaded a tile ahead, and the ids of their blocks two.
        first_key = (tile_count - 1) * TILE
        first_block = gl.maximum(first_key + places, 0) // BLOCK_SIZE
        blocks = gl.load(table_ptr + gl.minimum(first_block, last_block))
        key_scale = _load_scales(key_scales_ptr, blocks, first_key + places, head, length, KV_HEADS, BLOCK_SIZE)
        value_scale = _load_scales(value_scales_ptr, blocks, first_key + places, head, length, KV_HEADS, BLOCK_SIZE)
        blocks = gl.load(table_ptr + gl.maximum(first_key - TILE + places, 0) // BLOCK_SIZE)
        for step in range(tile_count):
            next_key = (tile_count - 2 - step) * TILE
            key_high, key_low = _scale_words(key_scale)
            value_high, value_low = _scale_words(value_scale)
            words.index(0).store(key_high)
            words.index(1).store(key_low)
            words.index(2).store(value_high)
            words.index(3).store(value_low)
            key_scale = _load_scales(key_scales_ptr, blocks, next_key + places, head, length, KV_HEADS, BLOCK_SIZE)
            value_scale = _load_scales(value_scales_ptr, blocks, next_key + places, head, length, KV_HEADS, BLOCK_SIZE)
            blocks = gl.load(table_ptr + gl.maximum(next_key - TILE + places, 0) // BLOCK_SIZE)
            stage = filled % STAGES
            free_phase = ((filled // STAGES) & 1) ^ 1
            _convert_tile(
                raw_keys.index(0), raw_key_full.index(0), raw_key_empty.index(0), done & 1,
                keys.index(stage), key_full.index(stage), key_empty.index(stage), free_phase,
                words.index(0), words.index(1), FORMAT,
            )  # fmt: skip
            _convert_tile(
                raw_values.index(0), raw_value_full.index(0), raw_value_empty.index(0), done & 1,
                values.index(stage), value_full.index(stage), value_empty.index(stage), free_phase,
                words.index(2), words.index(3), FORMAT,
            )  # fmt: skip
            filled += 1
            done += 1
        letter += 1
        is_work, _, query_count, _, length, head, key_end, table_row = read_mail(mail, mail_full, letter)
