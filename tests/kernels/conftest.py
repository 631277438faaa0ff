"""Without a GPU the kernels run in Triton's interpreter; that must be said before any kernel is imported.

The interpreter keeps scalars as arrays of one element, which NumPy 2.4 no longer turns into an int, so that a `range`
over a loaded length fails there; `_index_one_element` is how it reads such a scalar until Triton does so itself.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _index_one_element(self) -> int:
        return int(self.handle.data.item())

    def _patch_with_index(tensor, scope) -> None:
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", _index_one_element)

    interpreter._patch_lang_tensor = _patch_with_index
