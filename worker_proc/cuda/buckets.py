"""Which bucket a step runs in: the sizes that its buffers are padded to, and that its CUDA Graph is captured for.

Plain integers, no torch. A graph serves every step of its bucket, whatever the contexts' lengths are, so a bucket is
four things: which rows there are (decode, chunks, or both), how many rows, how many tokens, and whether anything asks
for the last hidden states of all of these. Sizes beyond the smallest are multiples of 16, for which the kernels are
compiled once. Called by the GPU runner, and by the passes.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

DECODE, CHUNK, MIXED = "decode", "chunk", "mixed"

_TINY_BATCHES = (1, 2, 4, 8)
_ROW_CLASSES = (1, 16, 32, 64, 128)
_ONE_ROW_TOKENS = 1536
"""Up to this size a step with one row has a bucket of its own."""

_TOKEN_SIZES = (
    16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096,
)  # fmt: skip
"""Sizes up to LARGE_TOKENS."""

LARGE_TOKENS = _TOKEN_SIZES[-1]
"""Steps above this are padded to 32 sizes between two powers of two, of which every fourth is prepared at start."""

_LONG_ROWS = 4
"""From LARGE_TOKENS on, so few prompts, which are long then, have buckets of their own, since attention takes other
tiles for them (kernels/prefill_plans.py); of other rows there are two classes: some, or as many as there may be."""

_MIDDLE_ROWS = 64
"""Steps with chunks and up to four times as many tokens are prepared for so many rows, larger ones for as many as there
may be: `wide_buckets`."""

_FIRST_DECODES = (1, 8, 32, 64, 256)
_FIRST_PROMPT_TOKENS = 128
_FIRST_FEW_TOKENS = (256, 1024)
_FIRST_WIDE_TOKENS = (2048, 8192)
"""What `first_buckets` are made of, beside the largest of each kind."""

FEWEST_ENDING_TOKENS = 512
"""From so many tokens on the last layer is done for the rows alone. Below, its products take about as long for these,
since reading their weights is what takes the time, and gathering the rows is a launch more."""

TOKENS_PER_ENDING_ROW = 4
"""And from so many tokens a row on: with fewer, most of the layer would be left, by kernels that are for few rows."""

_NEARLY_LARGEST = 0.875
"""A step of this share of the largest, as most of a long prompt's are, is padded to the largest, which is prepared."""


class Bucket(NamedTuple):
    """Sizes of a step, padding included.

    Attributes:
        kind: `decode`: every row is one token and row r is token r; `chunk`: no row is left to the decode kernel;
            `mixed`: decode rows first, then chunks.
        rows, tokens: at least the step's; equal for `decode`.
        every_token: the last hidden state of every token is asked for, and not only of the rows that sample: by log
            probabilities of prompts, or embeddings.
    """

    kind: str
    rows: int
    tokens: int
    every_token: bool = False

    @property
    def ends_in_rows(self) -> bool:
        """Whether a pass may leave out what only other tokens than those that sample take of the last layer."""
        is_worth_it = self.tokens >= max(FEWEST_ENDING_TOKENS, TOKENS_PER_ENDING_ROW * self.rows)
        return self.kind != DECODE and not self.every_token and is_worth_it


@lru_cache(maxsize=1024)
def bucket_of(
    decode_rows: int, chunk_rows: int, token_count: int, *, max_rows: int, max_tokens: int, every_token: bool = False
) -> Bucket:
    """The smallest bucket that holds a step of `decode_rows` single tokens and `chunk_rows` chunks."""
    rows = decode_rows + chunk_rows
    assert 0 < rows <= max_rows and rows <= token_count <= max_tokens, (rows, token_count, max_rows, max_tokens)
    if chunk_rows == 0:
        size = min(padded_batch(rows), max_rows)
        return Bucket(DECODE, size, size)
    padded_rows = rows if token_count <= _ONE_ROW_TOKENS else max(rows, 2)
    row_size = min(next((size for size in _ROW_CLASSES if size >= padded_rows), max_rows), max_rows)
    tokens = padded_tokens(max(token_count, row_size))
    if tokens >= LARGE_TOKENS:
        row_size = next((size for size in _large_rows(decode_rows == 0, max_rows) if size >= rows), max_rows)
        is_nearly_largest = tokens > LARGE_TOKENS and tokens >= _NEARLY_LARGEST * max_tokens
        tokens = max_tokens if is_nearly_largest else tokens
    kind = MIXED if decode_rows else CHUNK
    return Bucket(kind, min(row_size, max_tokens), min(tokens, max_tokens), every_token)


def _large_rows(is_chunk: bool, max_rows: int) -> list[int]:
    """The classes of rows of large steps but for the last, which is as many as there may be."""
    sizes = (_LONG_ROWS, _ROW_CLASSES[1]) if is_chunk else (_ROW_CLASSES[1],)
    return sorted({min(size, max_rows) for size in sizes})


def _large_buckets(size: int, max_rows: int) -> list[Bucket]:
    """Those of that many tokens but for the ones of `max_rows`."""
    return [Bucket(kind, rows, size) for kind in (CHUNK, MIXED) for rows in _large_rows(kind == CHUNK, max_rows)]


def exact_bucket(decode_rows: int, chunk_rows: int, token_count: int, *, every_token: bool = False) -> Bucket:
    """The step's own sizes: for eager execution, where padding would only be work."""
    kind = DECODE if chunk_rows == 0 else MIXED if decode_rows else CHUNK
    return Bucket(kind, decode_rows + chunk_rows, token_count, every_token)


def padded_batch(rows: int) -> int:
    """Rows of a decode bucket: 1, 2, 4, 8, then multiples of 16 up to 256, of 32 above."""
    if rows <= _TINY_BATCHES[-1]:
        return next(size for size in _TINY_BATCHES if size >= rows)
    step = 16 if rows <= 256 else 32
    return -(-rows // step) * step


def padded_tokens(token_count: int) -> int:
    """Tokens of a chunk or mixed bucket."""
    size = next((size for size in _TOKEN_SIZES if size >= token_count), 0)
    step = 1 << max(0, (token_count - 1).bit_length() - 6)
    return size or -(-token_count // step) * step


def decode_buckets(max_rows: int) -> list[Bucket]:
    """Every decode bucket, smallest first."""
    sizes = sorted({min(padded_batch(rows), max_rows) for rows in range(1, max_rows + 1)})
    return [Bucket(DECODE, size, size) for size in sizes]


def chunk_buckets(max_rows: int, max_tokens: int) -> list[Bucket]:
    """The usual buckets with chunks: one prompt alone, a few rows of any kind, very few long ones; and the largest of
    each kind."""
    sizes = sorted({min(size, max_tokens) for size in _TOKEN_SIZES})
    rows = min(_ROW_CLASSES[1], max_rows, max_tokens)
    one = [Bucket(CHUNK, 1, size) for size in sizes if size <= _ONE_ROW_TOKENS]
    few = [Bucket(kind, rows, size) for kind in (CHUNK, MIXED) for size in sizes if size >= rows]
    full = [each for size in sorted({min(LARGE_TOKENS, max_tokens), max_tokens}) if padded_tokens(size) >= LARGE_TOKENS
            for each in _large_buckets(size, max_rows)]  # fmt: skip
    return list(dict.fromkeys([*one, *few, *full, *largest_buckets(max_rows, max_tokens)]))


def wide_buckets(max_rows: int, max_tokens: int) -> list[Bucket]:
    """Buckets that between them hold nearly all steps with chunks which have no graph yet, with little padding."""
    large = list(_large_sizes(max_tokens))
    sizes = [size for size in _TOKEN_SIZES if size < max_tokens]
    middle = min(_MIDDLE_ROWS, max_rows, max_tokens)
    rows_and_sizes = [
        *((middle, size) for size in sizes if middle <= size <= 4 * middle),
        *((max_rows, size) for size in [*sizes, *large] if max_rows <= size and 4 * middle <= size),
    ]
    few = [each for size in large for each in _large_buckets(size, max_rows)]
    return few + [Bucket(kind, rows, size) for rows, size in rows_and_sizes for kind in (CHUNK, MIXED)]


def _large_sizes(max_tokens: int) -> Iterator[int]:
    """Eight sizes between two powers of two above LARGE_TOKENS, up to `max_tokens`."""
    size = LARGE_TOKENS
    while (size := size + (1 << (size.bit_length() - 4))) < _NEARLY_LARGEST * max_tokens:
        yield size
    if max_tokens > LARGE_TOKENS:
        yield max_tokens


def first_buckets(max_rows: int, max_tokens: int) -> list[Bucket]:
    """What is to be ready before the first request: few, and yet one of them holds any step, if with much padding. One
    prompt and its decoding come first."""
    sizes = sorted({min(rows, max_rows) for rows in (*_FIRST_DECODES, max_rows)})
    decodes = [Bucket(DECODE, rows, rows) for rows in sizes]
    few, wide = min(_ROW_CLASSES[1], max_rows, max_tokens), min(max_rows, max_tokens)
    shapes = [(few, size) for size in _FIRST_FEW_TOKENS]
    shapes += [(wide, size) for size in (*_FIRST_WIDE_TOKENS, max_tokens) if size >= wide]
    chunks = [Bucket(kind, rows, min(size, max_tokens)) for rows, size in shapes for kind in (CHUNK, MIXED)]
    prompt = Bucket(CHUNK, 1, min(_FIRST_PROMPT_TOKENS, max_tokens))
    return list(dict.fromkeys([decodes[0], prompt, *decodes[1:], *chunks]))


def start_buckets(max_rows: int, max_tokens: int) -> list[Bucket]:
    """All that is prepared without being asked for: the first ones, then every decode batch and the usual steps with
    chunks, then what stands in for all others."""
    usual, wide = _usual_buckets(max_rows, max_tokens), wide_buckets(max_rows, max_tokens)
    return list(dict.fromkeys([*first_buckets(max_rows, max_tokens), *usual, *wide]))


def _usual_buckets(max_rows: int, max_tokens: int) -> list[Bucket]:
    decodes, chunks = decode_buckets(max_rows), chunk_buckets(max_rows, max_tokens)
    return [decodes[0], *chunks[:4], *decodes[1:], *chunks[4:]]


def compiled_buckets(max_rows: int, max_tokens: int) -> list[Bucket]:
    """Those among which is one for each variant of a kernel that any step needs.

    These are the first and the usual ones; every size of many rows, since attention by which keys and values need not
    be kept reaches further up there than with few; every large size, since a product takes the tiles that fill the
    card, which goes up and down; and steps of most rows that need another variant.
    """
    many, rows = min(_ROW_CLASSES[-1], max_rows, max_tokens), min(max_rows, max_tokens)
    sizes = sorted({min(size, max_tokens) for size in _TOKEN_SIZES})
    wide = [Bucket(CHUNK, many, size) for size in sizes if size >= many]
    wide += [Bucket(CHUNK, min(_ROW_CLASSES[1], max_rows), size) for size in _every_large_size(max_tokens)]
    for each in (many, rows):
        least, most = min(padded_tokens(each), max_tokens), min(LARGE_TOKENS, max_tokens)
        wide += [Bucket(CHUNK, each, least), Bucket(MIXED, each, least), Bucket(CHUNK, each, most)]
    first, usual = first_buckets(max_rows, max_tokens), _usual_buckets(max_rows, max_tokens)
    return list(dict.fromkeys([*first, *usual, *wide]))


def _every_large_size(max_tokens: int) -> Iterator[int]:
    """All that steps are padded to above LARGE_TOKENS, but for the largest."""
    size = LARGE_TOKENS
    while (size := padded_tokens(size + 1)) < _NEARLY_LARGEST * max_tokens:
        yield size


def slowest_to_compile(max_rows: int, max_tokens: int) -> list[Bucket]:
    """A few of `first_buckets`, with the kernels that take longest."""
    first = first_buckets(max_rows, max_tokens)
    decodes, chunks = ([bucket for bucket in first if bucket.kind == kind] for kind in (DECODE, CHUNK))
    return list(dict.fromkeys([*decodes[:2], *chunks[-2:], decodes[-1]]))


def largest_buckets(max_rows: int, max_tokens: int) -> list[Bucket]:
    """What takes the most memory."""
    return [Bucket(kind, max_rows, max_tokens) for kind in (CHUNK, MIXED)]
