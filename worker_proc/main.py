"""The worker's entry: kept light, so that process title, death watch and heartbeat are up before torch is imported."""

import ctypes
import logging
import os
import threading
import time
from contextlib import suppress

from common.child import SupervisorLink
from common.config import EngineConfig
from common.processors import granted_threads, has_gpu
from kernels.import_torch import hash_triton, import_torch
from worker_proc.bytecode import compile_beside_import, keep_bytecode
from worker_proc.kernels_on_disk import compile_process, triton_folder

SPIN_COUNT = "1000"
"""Turns of the waiting loop. Milliseconds of a decode step of 16 requests, default model, two cores, on an idle machine
and at a load of seven: no turns 43 and 75, 1,000 turns 35 and 140, the default 28 and 1,050.
"""

KERNEL_CACHE_CAPACITY = "128"
"""Compiled products that oneDNN keeps, one for each shape, about 0.8 MB each; a step needs some tens. By default 1,024:
a tiny model in bfloat16 held 1,100 MB after 6,000 calls of all shapes, with this 680, and was no slower.
"""

logger = logging.getLogger(__name__)


def main(config: EngineConfig, link: SupervisorLink, rank: int) -> int:
    """Load the model and run steps until told to stop; returns the exit code."""
    limit_spinning()
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KERNEL_CACHE_CAPACITY)  # read when torch is imported
    start = time.monotonic()
    takes_gpu = config.model.device != "cpu" and has_gpu()
    if takes_gpu:
        keep_bytecode(triton_folder())
        compile_beside_import(granted_threads())
    compiler = compile_process(config)  # before the imports below: its own take as long
    if takes_gpu:
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does, for what reads it first now
        threading.Thread(target=wake_gpu, name="wake-gpu", daemon=True).start()
        hash_triton()
        import_torch()
    from worker_proc.worker import Worker

    logger.info("imported torch in %.1f s", time.monotonic() - start)
    return Worker(config, link, rank, compiler).run()


def limit_spinning() -> None:
    """Let torch's threads wait for one another only briefly before they sleep, unless the user has chosen otherwise.

    They would spin for milliseconds by default, which makes a step up to a hundred times slower where other processes
    use the CPU too: a thread that has work waits for its turn while its sibling spins. OpenMP reads this once, when
    torch is imported.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def wake_gpu() -> None:
    """Have the driver set up the first GPU for this process, which takes it part of a second, before torch asks for it.

    Without a usable driver nothing happens: torch will say why.
    """
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
