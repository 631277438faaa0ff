"""The worker's entry: light, so that process title, death watch and heartbeat stand before torch is imported."""

import logging
import os
import time

from common.child import SupervisorLink
from common.config import EngineConfig

logger = logging.getLogger(__name__)


def main(config: EngineConfig, link: SupervisorLink, rank: int) -> int:
    """Load the model and run steps until told to stop; returns the exit code."""
    # Torch's threads sleep while they wait for one another. Spinning, the default, is up to a hundred times slower
    # where other processes use the CPU too: a thread that has work waits for its turn while its sibling spins.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    start = time.monotonic()
    from worker_proc.worker import Worker

    logger.info("imported torch in %.1f s", time.monotonic() - start)
    return Worker(config, link, rank).run()
