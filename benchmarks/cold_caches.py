"""Empties the processor's caches between two measurements, as other programs do while a process waits for work.

Used by the benchmarks of single steps: on an engine at rest each step comes after a pause, and finds neither its data
nor its code where the last one left them.
"""

SWEPT_BYTES = 64 << 20


class Sweep:
    """Memory that fills the caches when it is read.

    Args:
        swept_bytes: more than the last cache level holds.
    """

    def __init__(self, swept_bytes: int = SWEPT_BYTES) -> None:
        self._memory = b"\1" * swept_bytes

    def __call__(self) -> None:
        """Read it once."""
        assert self._memory.find(b"\0") < 0
