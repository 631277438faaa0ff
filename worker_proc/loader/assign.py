"""Copies checkpoint tensors to where they belong in a model, and accounts for every one of them."""

import torch

from common.errors import ConfigError
from worker_proc.models.llama import LlamaForCausalLM

MAX_NAMES_SHOWN = 4
BASE_PREFIX = "model."
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry; the model computes them."""


class WeightAssigner:
    """Fills a model tensor by tensor, converting to its dtype and device on the way.

    With tied tables the embedding may come under either name, or under both. A checkpoint of a model without its head,
    as embedding models are often published, has names without `model.`.
    """

    def __init__(self, model: LlamaForCausalLM, *, source: str) -> None:
        self.source = source
        self.targets = model.checkpoint_targets()
        self.tied = model.config.tie_word_embeddings
        self.filled: set[str] = set()
        self.unexpected: list[str] = []

    def assign(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor of the checkpoint into the model. ConfigError if the shapes differ."""
        if self.tied and name == "lm_head.weight":
            name = "model.embed_tokens.weight"
        if name not in self.targets and BASE_PREFIX + name in self.targets:
            name = BASE_PREFIX + name
        target = self.targets.get(name)
        if target is None:
            if not name.endswith(IGNORED_SUFFIXES):
                self.unexpected.append(name)
            return
        if target.shape != tensor.shape:
            wanted, got = list(target.shape), list(tensor.shape)
            raise ConfigError(f"{self.source}: {name} has shape {got}, config.json asks for {wanted}")
        target.copy_(tensor)
        self.filled.add(name)

    def finish(self) -> None:
        """ConfigError naming what was missing or unexpected."""
        missing = [name for name in self.targets if name not in self.filled]
        problems = []
        if missing:
            problems.append(f"missing {shorten(missing)}")
        if self.unexpected:
            problems.append(f"unexpected {shorten(self.unexpected)}")
        if problems:
            raise ConfigError(f"{self.source}: weights do not fit config.json: {'; '.join(problems)}")


def shorten(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    more = len(names) - MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
