"""A GGUF file as a checkpoint that the loader can read: torch tensors under Hugging Face names."""

from collections.abc import Iterator
from pathlib import Path

import torch

from worker_proc.loader.gguf_file import GgufFile


class GgufCheckpoint:
    """See `loader.Checkpoint`; each tensor is dequantised when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.file_paths = [path]
        self.names = self.file.names

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, float32 unless the file stores float16."""
        for name in self.names:
            yield name, self.read(name)

    def shapes(self) -> Iterator[tuple[str, list[int]]]:
        """Of all tensors, without dequantising any."""
        for name, tensor in self.names.items():
            yield name, [int(size) for size in reversed(tensor.shape)]

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        array = self.file.read(name)
        return torch.from_numpy(array if array.flags.writeable else array.copy())
