"""A GPU that does not exist: kernels are compiled for it, and launches must be left out."""

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.compile_ahead import NoDevice


class PretendedDriver(NoDevice):
    """Enough of Triton's driver for a launch to come as far as compiling."""

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0


def pretend_gpu(architecture: int) -> None:
    """From here on kernels of this process are for a card of that compute capability, 90 for 9.0."""
    driver.set_active(PretendedDriver(GPUTarget("cuda", architecture, 32)))
