"""Products of a few query rows with a tile of the cache, plain or 8-bit: the inner loops of the decode kernels.

An 8-bit tile is loaded as pairs: two neighbouring elements of a vector as one int16. So the products' operands have two
bytes, which the hardware moves and transposes between shared memory and tensor cores; single bytes it does not. Even
and odd elements are separate operands, [tile, d / 2] each, made of the pairs in registers:

    scores = q_even . k_even + q_odd . k_odd            out_even = w . v_even,  out_odd = w . v_odd

| from  | to bfloat16, two elements in an instruction ("native")                                                      |
|-------|-------------------------------------------------------------------------------------------------------------|
| int8  | 128 + the low seven bits, less 128 or, by the sign bit, 256: exact, since bfloat16 holds 8 bits             |
| fp8   | sign, exponent and mantissa put in bfloat16's places: the number times 2^-120, subnormal numbers included   |

For the latter queries and weights are multiplied by 2^100 beforehand and the sums by 2^20 at the end: all exact, and
inside bfloat16's and float32's range. Elsewhere (other dtypes, the interpreter) pairs are taken apart with ordinary
conversions.

Float16 takes fewer: fp8 has an instruction of the card for it, which bfloat16 has not, and int8 is one bit more from an
exact difference. Its range is the caller's care (kernels/decode_attention_team.py).

Called by the decode kernels: kernels/decode_attention.py, kernels/fused_decode_attention.py, and what these launch.

Sources: Y. Kim et al., arXiv:2211.10017 (conversions by putting stored bits into a float's).
"""

import torch
import triton
import triton.language as tl

from kernels.kv_format import TOPS
from kernels.kv_quant import FP8, INT8
from kernels.launch import is_hopper_or_later

INT8_PAIRS = tl.constexpr("""
{
    .reg .b32 high, low_bits, sign_bits;
    lop3.b32 low_bits, $2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 sign_bits, $2, 0x00800080, 0x43004300, 0xEA;
    sub.rn.bf16x2 $0, low_bits, sign_bits;
    shr.u32 high, $2, 8;
    lop3.b32 low_bits, high, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 sign_bits, high, 0x00800080, 0x43004300, 0xEA;
    sub.rn.bf16x2 $1, low_bits, sign_bits;
}
""")  # 0xEA: (a & b) | c

FP8_PAIRS = tl.constexpr("""
{
    .reg .b32 magnitude, sign;
    and.b32 magnitude, $2, 0x007F007F;
    shl.b32 magnitude, magnitude, 4;
    shl.b32 sign, $2, 8;
    lop3.b32 $0, sign, 0x80008000, magnitude, 0xEA;
    and.b32 magnitude, $2, 0x7F007F00;
    shr.u32 magnitude, magnitude, 4;
    lop3.b32 $1, $2, 0x80008000, magnitude, 0xEA;
}
""")

FP8_NEIGHBOURS = tl.constexpr("""
{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
""")
"""Of two fp8 pairs the first, and the second, in float16: neighbours stay together."""

FP8_PARTS = tl.constexpr("""
{
    .reg .b16 low, high;
    .reg .b32 sorted;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
""")
"""Of two fp8 pairs the even elements, and the odd ones, in float16."""

INT8_PARTS = tl.constexpr("""
{
    .reg .b32 byte, base;
    mov.b32 base, 0x64806480;
    lop3.b32 byte, $2, 0x00FF00FF, base, 0x6A;
    sub.rn.f16x2 $0, byte, base;
    shr.u32 byte, $2, 8;
    lop3.b32 byte, byte, 0x00FF00FF, base, 0x6A;
    sub.rn.f16x2 $1, byte, base;
}
""")  # 0x6A: (a & b) ^ c
"""The same of int8 pairs: 1,152 and the element, less 1,152; exact, since float16 holds 11 bits."""

FP8_SHIFT = tl.constexpr(2.0**100)
"""What queries and weights are multiplied by, when native fp8 operands are 2^-120 of what they stand for."""

FP8_UNSHIFT = tl.constexpr(2.0**20)


def is_native(query: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether a kernel over an 8-bit cache takes pairs apart with instructions of the card."""
    return query.dtype == torch.bfloat16 and cache.dtype in TOPS and is_hopper_or_later(query.device)


def has_single_keys(query: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether keys are multiplied as single elements: queries that 15 bits, or float16, do not make less exact."""
    return cache.dtype in TOPS and query.dtype.itemsize == 2


@triton.jit
def unpacked(pairs, DTYPE: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Even and odd elements of int16 pairs in DTYPE; native fp8: times 2^-120."""
    if NATIVE:
        PAIRS: tl.constexpr = INT8_PAIRS if FORMAT == INT8 else FP8_PAIRS
        even, odd = tl.inline_asm_elementwise(
            PAIRS, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )  # fmt: skip
    elif FORMAT == INT8:
        even = ((pairs << 8) >> 8).to(DTYPE)
        odd = (pairs >> 8).to(DTYPE)
    else:
        even = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
        odd = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return even, odd


@triton.jit
def query_parts(rows, FORMAT: tl.constexpr, NATIVE: tl.constexpr, SINGLE: tl.constexpr):
    """Query rows [G, d] as `scores_of` takes them: two operands, and a factor [G] for what they give.

    Plain: the rows. Pairs: even and odd elements [G, d / 2]. SINGLE int8: multiples of 128 and the rest of 15-bit
    levels. SINGLE fp8: the rows as float16, their largest element made 1.
    """
    first, second = rows, rows
    unit = tl.full([rows.shape[0]], 1.0, tl.float32)
    if SINGLE:
        wide = rows.to(tl.float32)
        LEVELS: tl.constexpr = 127.0 * 128.0 if FORMAT == INT8 else 1.0
        unit = tl.max(tl.abs(wide), axis=1) / LEVELS
        unit = tl.where(unit > 0.0, unit, 1.0)
        level = wide / unit[:, None]
        if FORMAT == INT8:
            multiple = _nearest(level / 128.0)
            first = multiple.to(tl.int8)
            second = _nearest(level - multiple * 128.0).to(tl.int8)
        else:
            first = level.to(tl.float16)
    elif FORMAT > 0:
        first, second = tl.split(tl.reshape(rows, [rows.shape[0], rows.shape[1] // 2, 2]))
        if NATIVE and FORMAT == FP8:
            first = (first.to(tl.float32) * FP8_SHIFT).to(first.dtype)
            second = (second.to(tl.float32) * FP8_SHIFT).to(second.dtype)
    return first, second, unit


@triton.jit
def _nearest(x):
    return tl.floor(x + 0.5)


@triton.jit
def scores_of(first, second, unit, keys, FORMAT: tl.constexpr, NATIVE: tl.constexpr, SINGLE: tl.constexpr):
    """Products [G, tile] of query rows from `query_parts` with a tile of keys; without the keys' scales."""
    if FORMAT == 0:
        scores = tl.dot(first, tl.trans(keys), input_precision="ieee")
    elif SINGLE:
        if FORMAT == INT8:
            scores = (tl.dot(first, tl.trans(keys)) * 128 + tl.dot(second, tl.trans(keys))).to(tl.float32)
        else:
            scores = tl.dot(first, tl.trans(keys.to(tl.float16)))
        scores *= unit[:, None]
    else:
        even_keys, odd_keys = unpacked(keys, first.dtype, FORMAT, NATIVE)
        scores = tl.dot(first, tl.trans(even_keys), input_precision="ieee")
        scores = tl.dot(second, tl.trans(odd_keys), scores, input_precision="ieee")
        if NATIVE and FORMAT == FP8:
            scores *= FP8_UNSHIFT
    return scores


@triton.jit
def add_weighted(even, odd, shrink, weights, values, value_scale, DTYPE: tl.constexpr, FORMAT: tl.constexpr,
                 NATIVE: tl.constexpr):  # fmt: skip
    """The sums (even, odd), times `shrink`, plus weights [G, tile] . values; only `even` is used without pairs.

    Native fp8: the sums are 2^-20 of what they stand for, until `whole_sums`.
    """
    if FORMAT == 0:
        even = tl.dot(weights.to(DTYPE), values, even * shrink[:, None], input_precision="ieee")
    else:
        scale = value_scale.to(tl.float32)
        if NATIVE and FORMAT == FP8:
            scale *= FP8_SHIFT
        weights = (weights * scale[None, :]).to(DTYPE)
        even_values, odd_values = unpacked(values, DTYPE, FORMAT, NATIVE)
        even = tl.dot(weights, even_values, even * shrink[:, None], input_precision="ieee")
        odd = tl.dot(weights, odd_values, odd * shrink[:, None], input_precision="ieee")
    return even, odd


@triton.jit
def attend_tile(first_query, second_query, unit, keys, key_scale, values, value_scale, inside, scale_log2, maximum,
                normaliser, even, odd, DTYPE: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """(maximum, normaliser, even, odd) with a tile's keys and values in: a running softmax. Where not `inside` nothing
    is seen; a tile holds at least one position that is."""
    scores = scores_of(first_query, second_query, unit, keys, FORMAT, NATIVE, False)
    if FORMAT > 0:
        scores *= key_scale.to(tl.float32)[None, :]
    scores = tl.where(inside[None, :], scores * scale_log2, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_maximum[:, None])
    shrink = tl.exp2(maximum - new_maximum)
    even, odd = add_weighted(even, odd, shrink, weights, values, value_scale, DTYPE, FORMAT, NATIVE)
    return new_maximum, normaliser * shrink + tl.sum(weights, axis=1), even, odd


@triton.jit
def split_sums(rows, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Float32 sums [G, d] as `add_weighted` keeps them."""
    even, odd = rows, rows
    if FORMAT > 0:
        even, odd = tl.split(tl.reshape(rows, [rows.shape[0], rows.shape[1] // 2, 2]))
        if NATIVE and FORMAT == FP8:
            even, odd = even / FP8_UNSHIFT, odd / FP8_UNSHIFT
    return even, odd


@triton.jit
def whole_sums(even, odd, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """The sums [G, d] again."""
    result = even
    if FORMAT > 0:
        result = tl.interleave(even, odd)
        if NATIVE and FORMAT == FP8:
            result *= FP8_UNSHIFT
    return result


@triton.jit
def prefetch_lines(address, PDL: tl.constexpr):
    """Ask for the cache lines at a tensor of addresses; waits for nothing. Only where PDL says that it is a GPU."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def _tile_places(table, first, inside, head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Places of a tile's cached positions, from `first` on, in either cache, counted in vectors."""
    lane = tl.arange(0, TILE)
    in_block = (first + lane) % BLOCK_SIZE
    if TILE % BLOCK_SIZE == 0:  # tiles are aligned to blocks
        in_block = lane % BLOCK_SIZE
    block = tl.load(table + (first + lane) // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return block * (KV_HEADS * BLOCK_SIZE) + (head * BLOCK_SIZE + in_block)


@triton.jit
def _as_units(cache, FORMAT: tl.constexpr):
    """A pointer to what tiles are loaded as: elements, or pairs of 8-bit ones."""
    if FORMAT > 0:
        return cache.to(tl.pointer_type(tl.int16))
    else:
        return cache


@triton.jit
def _load_vectors(cache, scales, place, inside, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Vectors at `place`, as elements or as pairs, and their scales; beside a plain cache `place` stands for these."""
    WIDTH: tl.constexpr = HEAD_DIM if FORMAT == 0 else HEAD_DIM // 2
    unit = tl.arange(0, WIDTH)
    vectors = tl.load(_as_units(cache, FORMAT) + place[:, None] * WIDTH + unit[None, :], mask=inside[:, None], other=0)
    scale = place
    if FORMAT > 0:
        scale = tl.load(scales + place, mask=inside, other=0.0)
    return vectors, scale


@triton.jit
def load_tile(
    key_cache, value_cache, key_scales, value_scales, table, first, inside, head,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Keys [TILE, d] and values of a K/V head's cached positions from `first` on, each followed by its scales [TILE];
    and the positions' places in the caches [TILE]. Over an 8-bit cache d is half of HEAD_DIM: pairs."""
    place = _tile_places(table, first, inside, head, KV_HEADS, BLOCK_SIZE, TILE)
    keys, key_scale = _load_vectors(key_cache, key_scales, place, inside, HEAD_DIM, FORMAT)
    values, value_scale = _load_vectors(value_cache, value_scales, place, inside, HEAD_DIM, FORMAT)
    return keys, key_scale, values, value_scale, place


@triton.jit
def prefetch_tile(cache, place, inside, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr):
    """Ask for the cache lines, of 128 bytes, of the vectors at `place`; HEAD_DIM is a power of two."""
    WIDTH: tl.constexpr = HEAD_DIM if FORMAT == 0 else HEAD_DIM // 2
    line = 64 * tl.arange(0, (WIDTH + 63) // 64)
    place = tl.where(inside, place, 0) * WIDTH
    prefetch_lines(_as_units(cache, FORMAT) + place[:, None] + line[None, :], PDL)


def merge_sizes(group: int, dim_tile: int, numbers: int = 64) -> tuple[int, int]:
    """How many parts, of how many query heads, `merge_parts` holds at a time: 128 * `numbers` sums."""
    heads = min(triton.next_power_of_2(group), 4)
    return max(1, 128 * numbers // (heads * dim_tile)), heads


@triton.jit
def merge_parts(
    output, partials, statistics, first_place, step, first_shift, part_count,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM_TILE: tl.constexpr, PARTS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one (row, K/V head) into its output, PARTS parts of HEADS query heads at a time.

    Part i is at `first_place` + i * `step`, the first at `first_shift` beyond that: in `partials` [place, ROWS,
    DIM_TILE] the accumulators, in `statistics` [place, 2, ROWS] maxima (powers of two) and normalisers.
    """
    dims = tl.arange(0, DIM_TILE)
    for first_query in range(0, GROUP, HEADS):
        queries = first_query + tl.arange(0, HEADS)
        maximum = tl.full([HEADS], float("-inf"), dtype=tl.float32)
        normaliser = tl.zeros([HEADS], dtype=tl.float32)
        accumulator = tl.zeros([HEADS, DIM_TILE], dtype=tl.float32)
        for first_part in range(0, part_count, PARTS):
            parts = first_part + tl.arange(0, PARTS)
            is_part = (parts < part_count)[:, None] & (queries < GROUP)[None, :]
            places = first_place + parts * step + tl.where(parts == 0, first_shift, 0)
            statistic = statistics + places[:, None] * (2 * ROWS) + queries[None, :]
            part_maximum = tl.load(statistic, mask=is_part, other=float("-inf"), cache_modifier=".cg")
            part_normaliser = tl.load(statistic + ROWS, mask=is_part, other=0.0, cache_modifier=".cg")
            sums = partials + (places[:, None] * ROWS + queries[None, :])[:, :, None] * DIM_TILE + dims[None, None, :]
            part_sums = tl.load(sums, mask=is_part[:, :, None], other=0.0, cache_modifier=".cg")
            new_maximum = tl.maximum(maximum, tl.max(part_maximum, axis=0))
            # Query rows that pad the group have no maximum; they are not stored.
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(part_maximum - base[None, :])
            shrink = tl.exp2(maximum - base)
            normaliser = normaliser * shrink + tl.sum(part_normaliser * weights, axis=0)
            accumulator = accumulator * shrink[:, None] + tl.sum(part_sums * weights[:, :, None], axis=0)
            maximum = new_maximum
        result = accumulator * (1.0 / tl.where(queries < GROUP, normaliser, 1.0))[:, None]
        place = output + queries[:, None] * HEAD_DIM + dims[None, :]
        is_output = (queries < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(place, result.to(output.dtype.element_ty), mask=is_output)
