"""Loads a model folder from disk into a model that is ready to run on a device.

`load_model` is the entry, or `unfilled_model` for a caller that has use for the model before its weights are there: the
worker, once at start. Nothing here knows of requests or of the cache.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from common.errors import ConfigError
from worker_proc.layers.linear import cpu_has_bfloat16
from worker_proc.loader.assign import WeightAssigner
from worker_proc.loader.dummy import fill_with_random
from worker_proc.loader.safetensors_checkpoint import SafetensorsCheckpoint
from worker_proc.model_config import ModelConfig, read_model_config
from worker_proc.models import MODEL_CLASSES
from worker_proc.models.llama import LlamaForCausalLM

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMBEDDING_NAME, LM_HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names; `names` has every name as a key, `file_paths` the files."""

    names: Mapping[str, Any]

    @property
    def file_paths(self) -> list[Path]:
        """The files that hold them."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, each read when it is yielded."""

    def shapes(self) -> Iterator[tuple[str, list[int]]]:
        """The shapes of all tensors, without reading any."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""


def load_model(
    model_dir: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
) -> LlamaForCausalLM:
    """Build the model that `model_dir/config.json` describes and fill it.

    Args:
        load_format: `safetensors` and `gguf` say which weights of the folder to read, `auto` takes what is there;
            `dummy` needs only config.json and draws random weights from `seed`.

    Raises:
        ConfigError: unsupported model; missing, unexpected or misshapen tensors, by name.
    """
    model, fill = unfilled_model(model_dir, device=device, dtype=dtype, load_format=load_format, seed=seed)
    fill()
    return model


def unfilled_model(
    model_dir: Path, *, device: torch.device, dtype: torch.dtype, load_format: str, seed: int
) -> tuple[LlamaForCausalLM, Callable[[], None]]:
    """As `load_model`: a model with uninitialised parameters, and what fills it, to be called once.

    Raises:
        ConfigError: as `load_model`; what is wrong with tensors is found when they are filled in.
    """
    config = read_model_config(model_dir)
    checkpoint = None if load_format == "dummy" else open_checkpoint(model_dir, load_format)
    if checkpoint is not None and config.tie_word_embeddings and not _tables_agree(checkpoint):
        config = replace(config, tie_word_embeddings=False)
    model = build_model(config, device, dtype)

    def fill() -> None:
        if checkpoint is None:
            fill_with_random(model, seed)
        else:
            _fill_from(checkpoint, model, source=str(model_dir))
        model.pack()

    return model, fill


def build_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model with uninitialised parameters."""
    with torch.device(device), _default_dtype(dtype):
        return MODEL_CLASSES[config.architecture](config).eval()


def resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype to compute in. `auto`: on a CPU bfloat16 if it has the instructions, else float32; on a GPU the
    checkpoint's own 16-bit dtype, bfloat16 for a float32 checkpoint.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ConfigError(f"dtype {name!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def open_checkpoint(model_dir: Path, load_format: str) -> Checkpoint:
    """The weights of a model folder, not read yet; raises ConfigError where there are none, or not all."""
    if load_format not in ("auto", "safetensors", "gguf"):
        raise ConfigError(f"load format {load_format!r} is not supported; supported: auto, safetensors, gguf, dummy")
    gguf_paths = sorted(model_dir.glob("*.gguf"))
    has_safetensors = any(model_dir.glob("*.safetensors"))
    if load_format == "gguf" or (load_format == "auto" and gguf_paths and not has_safetensors):
        if len(gguf_paths) != 1:
            raise ConfigError(f"{model_dir} holds {len(gguf_paths)} .gguf files; wanted one")
        from worker_proc.loader.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(gguf_paths[0])
    return SafetensorsCheckpoint(model_dir)


def check_fits(model: LlamaForCausalLM, model_dir: Path, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint as loading it would, from its tensors' names and shapes.

    Args:
        model: on the device `meta`, which holds shapes and no numbers.

    Raises:
        ConfigError: missing, unexpected or misshapen tensors, by name; a file that cannot be read or is cut off.
    """
    assigner = WeightAssigner(model, source=str(model_dir))
    for name, shape in checkpoint.shapes():
        assigner.assign(name, torch.empty(shape, device="meta"))
    assigner.finish()


def _fill_from(checkpoint: Checkpoint, model: LlamaForCausalLM, source: str) -> None:
    assigner = WeightAssigner(model, source=source)
    for name, tensor in checkpoint.tensors():
        assigner.assign(name, tensor)
    assigner.finish()


def _tables_agree(checkpoint: Checkpoint) -> bool:
    """False if a checkpoint that says it ties its tables holds two different ones: then both are used, as trained."""
    if EMBEDDING_NAME not in checkpoint.names or LM_HEAD_NAME not in checkpoint.names:
        return True
    return torch.equal(checkpoint.read(EMBEDDING_NAME), checkpoint.read(LM_HEAD_NAME))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
