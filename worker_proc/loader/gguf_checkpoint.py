"""A GGUF file as a checkpoint that the loader can read: torch tensors under Hugging Face names."""

from collections.abc import Iterator
from pathlib import Path

import torch

from worker_proc.loader.gguf_file import GgufFile


class GgufCheckpoint:
    """See `loader.Checkpoint`; each tensor is dequantised when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.names = self.file.names

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, float32 unless the file stores float16."""
        for name in self.names:
            yield name, self.read(name)

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        array = self.file.read(name)
        return torch.from_numpy(array if array.flags.writeable else array.copy())
