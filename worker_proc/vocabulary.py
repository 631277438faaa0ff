"""How many token ids the tokenizer has. Models often have more ids, as padding, and those must not be sampled.

Reads only the vocabulary of `tokenizer.json`, so that the worker needs no tokenizer library and skips the merges.
"""

from pathlib import Path
from typing import Any

import msgspec

from common.errors import ConfigError


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any]


class _AddedToken(msgspec.Struct):
    id: int


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] | None = None


def tokenizer_vocab_size(tokenizer_dir: Path, model_vocab_size: int) -> int:
    """One more than the tokenizer's greatest id, at most `model_vocab_size`; that itself where no tokenizer.json lies.

    Raises:
        ConfigError: the file is not what a tokenizer.json is.
    """
    path = tokenizer_dir / "tokenizer.json"
    if not path.is_file():
        return model_vocab_size
    try:
        tokenizer = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read the vocabulary of {path}: {error}") from None
    vocabulary = tokenizer.model.vocab
    ids = [token.id for token in tokenizer.added_tokens or ()]
    ids += vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    return min(max(ids, default=-1) + 1, model_vocab_size) or model_vocab_size
