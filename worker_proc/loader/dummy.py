"""Random weights at a configuration's real shapes, for timing and for tests without a checkpoint."""

import torch

from worker_proc.models.llama import LlamaForCausalLM

STANDARD_DEVIATION = 0.02


def fill_with_random(model: LlamaForCausalLM, seed: int) -> None:
    """Normal weights, norms one, biases zero. Drawn on the CPU in float32, so every device gets the same model."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, target in model.checkpoint_targets().items():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        elif name.endswith(".bias"):
            target.zero_()
        else:
            target.copy_(torch.randn(target.shape, generator=generator, dtype=torch.float32) * STANDARD_DEVIATION)
