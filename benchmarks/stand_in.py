"""A stand-in tokenizer for model folders with a configuration and nothing else: token ids in, token ids out.

Bytes have the first ids, and every further id of the model's vocabulary is a made-up word, so that no id is taken for
padding of the vocabulary. Called by the benchmarks before an engine starts.
"""

import json
from pathlib import Path


def write_stand_in_tokenizer(folder: Path) -> None:
    """Write tokenizer.json into a folder that has config.json but no tokenizer; any other folder is left alone."""
    path = folder / "tokenizer.json"
    if path.exists() or not (folder / "config.json").exists():
        return
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokens = _byte_letters() + [f"word{token_id}" for token_id in range(256, vocab_size)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []},
    }
    path.write_text(json.dumps(tokenizer))


def _byte_letters() -> list[str]:
    """The letters that byte-level vocabularies write the 256 bytes with: printable ones as they are."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
