"""Without a GPU the kernels run in Triton's interpreter; that must be said before any kernel is imported."""

import torch

from kernels import interpreter

if not torch.cuda.is_available():
    interpreter.enable()
