"""The same tensor has the same name in all kernels, so that one set of arguments fits all of them."""

import ast
from pathlib import Path

import pytest

KERNELS = sorted((Path(__file__).parents[2] / "kernels").glob("*.py"))
CACHE_NAMES = {"key_cache", "value_cache", "key_scales", "value_scales", "next_key_cache", "next_value_cache"}


def cache_arguments(path: Path) -> set[str]:
    """All arguments of functions that are a cache or its scales, without the `_ptr` that some kernels append."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    names = {arg.arg.removesuffix("_ptr") for f in functions for arg in (*f.args.args, *f.args.kwonlyargs)}
    halves = ("k_", "v_", "key_", "value_", "next_")
    return {name for name in names if name.startswith(halves) and name.endswith(("_cache", "_scales"))}


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_caches_and_their_scales_have_one_name(path):
    assert cache_arguments(path) <= CACHE_NAMES


def test_the_files_that_read_caches_are_among_them():
    assert sum(bool(cache_arguments(path)) for path in KERNELS) > 8
