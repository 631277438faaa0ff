"""Early launch in the kernels that are written in Gluon: `let_next_start` and `wait_for_inputs` of kernels/launch.py.

kernels/launch.py has the rules that both keep. Called by the kernels for Hopper.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def let_next_start(PDL: gl.constexpr):
    """Permit the next kernel of the stream to be placed on the card as soon as every program has come this far."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def wait_for_inputs(PDL: gl.constexpr):
    """Wait until all earlier kernels have completed and their writes can be read."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
