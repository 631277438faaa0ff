"""Reads a folder of safetensors files, one tensor at a time, so that memory never holds a second copy of the model."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from common.errors import ConfigError
from common.model_files import read_object
from worker_proc.loader.assign import shorten

INDEX_NAME = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """The tensors of a model folder: one file, or shards with an index.

    Attributes:
        names: tensor name -> file that holds it.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.names = self._read_index() if os.path.lexists(model_dir / INDEX_NAME) else self._read_headers()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, file by file; each is read from the memory-mapped file when it is yielded."""
        for name, file in self._places():
            yield name, file.get_tensor(name)

    def shapes(self) -> Iterator[tuple[str, list[int]]]:
        """Of all tensors, from the files' headers alone; raises as `tensors` does, of a file that was cut off too."""
        for name, file in self._places():
            yield name, file.get_slice(name).get_shape()

    @property
    def file_paths(self) -> list[Path]:
        """The files that hold them, sorted."""
        return sorted(set(self.names.values()))

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        with _open(self.names[name]) as file:
            return file.get_tensor(name)

    def _places(self) -> Iterator[tuple[str, safe_open]]:
        """Every tensor's name with the open file that holds it, file by file."""
        names_of: dict[Path, list[str]] = {}
        for name, path in self.names.items():
            names_of.setdefault(path, []).append(name)
        for path in self.file_paths:
            with _open(path) as file:
                present = set(file.keys())
                for name in names_of[path]:
                    if name not in present:
                        raise ConfigError(f"{path} does not hold {name}, which {INDEX_NAME} places there")
                    yield name, file

    def _read_index(self) -> dict[str, Path]:
        weight_map = read_object(self.model_dir / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{self.model_dir / INDEX_NAME} has no weight_map")
        files = sorted({str(file_name) for file_name in weight_map.values()})
        if outside := [file for file in files if file.startswith("/") or ".." in file.split("/")]:
            raise ConfigError(f"{self.model_dir}: {INDEX_NAME} names files outside of the folder: {shorten(outside)}")
        if missing := [file for file in files if not os.path.isfile(f"{self.model_dir}/{file}")]:
            raise ConfigError(
                f"{self.model_dir}: {len(missing)} of the {len(files)} files that {INDEX_NAME} names are missing: "
                f"{shorten(missing)}; download the model again"
            )
        paths = {file: self.model_dir / file for file in files}
        return {name: paths[str(file_name)] for name, file_name in weight_map.items()}

    def _read_headers(self) -> dict[str, Path]:
        paths = sorted(self.model_dir.glob("*.safetensors"))
        if not paths:
            raise ConfigError(f"{self.model_dir} holds no .safetensors file; other formats must be converted first")
        names: dict[str, Path] = {}
        for path in paths:
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name in names:
                        raise ConfigError(f"{name} is in both {names[name].name} and {path.name} of {self.model_dir}")
                    names[name] = path
        return names


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}; download or convert the model again") from error
