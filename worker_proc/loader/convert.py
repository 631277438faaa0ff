"""Turns a GGUF file into a model folder (config, tokenizer, weights), written elsewhere and renamed when complete."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from common.scratch import scratch_folder
from worker_proc.loader.gguf_config import make_config, make_generation_config
from worker_proc.loader.gguf_file import GgufFile
from worker_proc.loader.gguf_tokenizer import make_tokenizer, make_tokenizer_config

LINK_NAME = "model.gguf"


def convert_gguf(
    gguf_path: Path, folder: Path, *, copy_weights: bool, sampling: Mapping[str, float] | None = None
) -> None:
    """Make `folder` from a GGUF file, unless another process makes it first.

    Args:
        copy_weights: True writes model.safetensors in float32, which holds the dequantised values exactly (16-bit types
            do not) and loads in a tenth of the time that dequantising takes: 0.2 s against 3 s for 135M parameters.
            False links to the GGUF file, which is read at every start: right for large files, whose float32 form would
            be several times as big.
    """
    file = GgufFile(gguf_path)

    def fill(target: Path) -> None:
        _write_json(target / "config.json", make_config(file, "float32"))
        _write_json(target / "generation_config.json", make_generation_config(file, sampling or {}))
        _write_json(target / "tokenizer_config.json", make_tokenizer_config(file))
        make_tokenizer(file).save(str(target / "tokenizer.json"))
        if copy_weights:
            weights = {name: array.astype(np.float32) for name, array in file.arrays()}
            save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        else:
            (target / LINK_NAME).symlink_to(gguf_path.resolve())

    write_folder(folder, fill)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Create `folder` with the files that `fill` writes: all of them or none, whoever else tries at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder.parent, f".{folder.name}-") as temporary:
        fill(temporary)
        temporary.chmod(0o755)
        for path in temporary.iterdir():
            if not path.is_symlink():
                path.chmod(0o644)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():
                raise


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
