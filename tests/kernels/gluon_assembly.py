"""Inline assembly of emulated Gluon kernels, executed instruction by instruction on 32-bit words kept as int64.

Called by tests/kernels/gluon_emulator.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from tests.kernels.gluon_memory import torch_dtype_of


def _halves(words: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (words & 0xFFFFFFFF).to(torch.uint32).view(dtype).float()


def _words(halves: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return halves.to(dtype).view(torch.uint32).to(torch.int64)


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _words(_halves(a, torch.float16) - _halves(b, torch.float16), torch.float16)


def _two_of_fp8(a: torch.Tensor) -> torch.Tensor:
    return _words(a.to(torch.uint16).view(torch.float8_e4m3fn).float(), torch.float16)


def _floats(words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.uint32).view(torch.float32)


def _float_words(floats: torch.Tensor) -> torch.Tensor:
    return floats.view(torch.uint32).to(torch.int64)


def _of_floats(function: Callable[..., torch.Tensor], flushes: bool = False) -> Callable[..., torch.Tensor]:
    """An instruction on float32; `flushes`: what is too small for a full number of digits counts as zero (ftz)."""

    def flushed(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0 * x, x) if flushes else x

    return lambda *operands: _float_words(flushed(function(*(flushed(_floats(each)) for each in operands))))


def _permuted(low: torch.Tensor, high: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    both = low | (high << 32)
    result = torch.zeros_like(both)
    for place in range(4):
        picked = (selector >> (4 * place)) & 0xF
        byte = (both >> (8 * (picked & 7))) & 0xFF
        result |= torch.where(picked & 8 > 0, (byte >> 7) * 0xFF, byte) << (8 * place)
    return result


def _looked_up(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(a)
    for case in range(8):
        if (int(table.flatten()[0]) >> case) & 1:
            chosen = [value if case & bit else ~value for value, bit in ((a, 4), (b, 2), (c, 1))]
            result |= chosen[0] & chosen[1] & chosen[2]
    return result & 0xFFFFFFFF


_INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda a: a,
    "mov.low": lambda a: a & 0xFFFF,
    "mov.high": lambda a: (a >> 16) & 0xFFFF,
    "cvt.rn.f16x2.e4m3x2": _two_of_fp8,
    "sub.rn.f16x2": _difference,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _permuted,
    "lop3.b32": _looked_up,
    "sub.rn.bf16x2": lambda a, b: _words(_halves(a) - _halves(b)),
    "mul.rn.f16x2": lambda a, b: _words(_halves(a, torch.float16) * _halves(b, torch.float16), torch.float16),
    "mul.rn.bf16x2": lambda a, b: _words(_halves(a) * _halves(b)),
    "mul.f32": _of_floats(torch.mul),
    "add.f32": _of_floats(torch.add),
    "ex2.approx.ftz.f32": _of_floats(torch.exp2, flushes=True),
    "rcp.approx.ftz.f32": _of_floats(torch.reciprocal, flushes=True),
    "fma.rn.bf16x2": lambda a, b, c: _words((_halves(a).double() * _halves(b).double() + _halves(c).double()).float()),
}


def _literal(text: str) -> int:
    """A number's word; `0f` and eight digits are a float32's."""
    return int(text[2:], 16) if text.startswith("0f") else int(text, 0)


def _executed(text: str, outputs: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The `outputs` words that an assembly text makes of its input words, all of one shape."""
    registers = {f"${outputs + index}": words for index, words in enumerate(inputs)}
    text = re.sub(r"mov\.b32 \{(\w+), (\w+)\}, ([$\w]+);", r"mov.low \1, \3; mov.high \2, \3;", text)
    for statement in re.sub(r"//.*|[{}]", "", text).replace("\n", " ").split(";"):
        words = statement.split(None, 1)
        if not words or words[0] == ".reg":
            continue
        target, *names = [name.strip() for name in words[1].split(",")]
        operands = [registers[n] if n in registers else torch.full_like(inputs[0], _literal(n)) for n in names]
        registers[target] = _INSTRUCTIONS[words[0]](*operands)
    return [registers[f"${index}"] for index in range(outputs)]


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Neighbouring elements along the last dimension as 32-bit words."""
    if values.element_size() == 4:
        return values.contiguous().view(torch.uint32).to(torch.int64)
    return values.contiguous().flatten().view(torch.uint32).to(torch.int64)


def inline_asm(text, constraints, args, dtype, is_pure, pack):
    """`gl.inline_asm_elementwise`: words of packed elements in and out; what only orders instructions does nothing."""
    text = getattr(text, "value", text)
    if "griddepcontrol" in text or "prefetch" in text:
        return None
    if "pmevent" in text:
        return args[0]
    if "cvt.rn.bf16x2.f32" in text or "cvt.rn.f16x2.f32" in text:
        return args[0].to(torch_dtype_of(dtype))
    args = torch.broadcast_tensors(*args)
    shape, count = args[0].shape, constraints.count("=")
    if isinstance(dtype, tuple):  # a word in, a word out for each result
        results = _executed(text, count, [_packed(each) for each in args])
        return tuple(
            words.to(torch.uint32).view(torch_dtype_of(each)).reshape(shape)
            for words, each in zip(results, dtype, strict=True)
        )
    if pack == 1 or all(each.element_size() == 2 for each in args):
        (words,) = _executed(text, count, [_packed(each) for each in args])
        return words.to(torch.uint32).view(torch_dtype_of(dtype)).reshape(shape)
    # Four bytes make two words; what goes with them is the same for the four.
    stored, *others = args
    words = [_packed(stored)]
    for other in others:
        words += list(_packed(other).reshape(-1, 4).t())
    low, high = _executed(text, count, words)
    return torch.stack([low, high], -1).to(torch.uint32).view(torch_dtype_of(dtype)).reshape(shape)
