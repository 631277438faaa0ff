"""How many token ids the tokenizer has: models often have more, as padding, and those must not be sampled.

Reads `tokenizer.json` alone, so that the worker needs no tokenizer library.
"""

import json
from pathlib import Path

from common.errors import ConfigError


def tokenizer_vocab_size(tokenizer_dir: Path, model_vocab_size: int) -> int:
    """One more than the tokenizer's greatest id, at most `model_vocab_size`; that itself where no tokenizer.json lies.

    Raises:
        ConfigError: the file is not what a tokenizer.json is.
    """
    path = tokenizer_dir / "tokenizer.json"
    if not path.is_file():
        return model_vocab_size
    try:
        tokenizer = json.loads(path.read_bytes())
        vocabulary = tokenizer["model"]["vocab"]
        greatest = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        greatest = max([greatest, *(token["id"] for token in tokenizer.get("added_tokens") or ())])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read the vocabulary of {path}: {type(error).__name__}: {error}") from None
    return min(greatest + 1, model_vocab_size)
