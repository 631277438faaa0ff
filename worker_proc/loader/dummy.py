"""Random weights at a configuration's real shapes, for timing and for tests without a checkpoint."""

import torch

from worker_proc.models.llama import LlamaForCausalLM

STANDARD_DEVIATION = 0.02


def fill_with_random(model: LlamaForCausalLM, seed: int) -> None:
    """Normal weights, norms one, biases zero; drawn on the model's device, so the same seed differs between devices."""
    generator = torch.Generator(model.model.norm.weight.device).manual_seed(seed)
    for name, target in model.checkpoint_targets().items():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        elif name.endswith(".bias"):
            target.zero_()
        else:
            target.normal_(0.0, STANDARD_DEVIATION, generator=generator)
