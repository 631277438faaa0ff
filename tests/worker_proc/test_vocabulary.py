"""How many ids a tokenizer has, read from its file."""

import json

import pytest

from common.errors import ConfigError
from worker_proc.vocabulary import tokenizer_vocab_size


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ({"model": {"vocab": {"a": 0, "b": 1, "c": 2}}}, 3),
        ({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 7, "content": "<end>"}]}, 8),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": None}, 2),
        ({"model": {"vocab": {"a": 50}}}, 10),
    ],
)
def test_one_more_than_the_greatest_id_but_no_more_than_the_model_has(tmp_path, tokenizer, expected):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert tokenizer_vocab_size(tmp_path, 10) == expected


def test_without_the_file_all_ids_of_the_model_count(tmp_path):
    assert tokenizer_vocab_size(tmp_path, 10) == 10


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="tokenizer.json"):
        tokenizer_vocab_size(tmp_path, 10)
