"""The real worker process with a runner that computes nothing, for measurements of everything around the model.

    python -m benchmarks.stub_worker --config FILE [--prompt-ms 1.6] [--decode-ms 0.5] [--token-us 0]

Sockets, loop and report thread are the worker's own. Every sampled token is id 1, and is there a fixed time after its
step was issued: `--prompt-ms` for steps that compute some of a prompt, with `--token-us` more for each token of it,
and `--decode-ms` for the others. Started by benchmarks/hops.py in the place of `python -m worker_proc`.
"""

import argparse
import sys
import time
from array import array

from common.child import run_child
from common.config import EngineConfig
from common.messages import StepPlan
from kernels.compile_process import CompileProcess
from worker_proc import main, worker
from worker_proc.engine import Engine
from worker_proc.kv_cache import CacheSize
from worker_proc.pending import Arrived, PendingStep

VOCAB_SIZE = 49_152
SIZE = CacheSize(max_model_len=8192, block_count=4096, host_block_count=0, block_bytes=1 << 20)


class StubRunner:
    """Answers plans with tokens that nobody computed.

    Args:
        prompt_s: how long a step takes that computes some of a prompt.
        decode_s: how long another one takes.
        token_s: what each token of a prompt adds.
    """

    def __init__(self, prompt_s: float, decode_s: float, token_s: float = 0.0) -> None:
        self._prompt_s = prompt_s
        self._token_s = token_s
        self._decode_s = decode_s
        self._free_at_s = 0.0

    def execute(self, plan: StepPlan) -> PendingStep:
        """A step of as many tokens as the plan samples, behind those before it."""
        step_s = self._prompt_s if plan.chunk_slots else self._decode_s
        step_s += self._token_s * sum(plan.chunk_token_counts)
        done_at_s = self._free_at_s = max(self._free_at_s, time.monotonic()) + step_s
        count = len(plan.decode_slots) + sum(plan.chunk_samples)

        def arrive() -> Arrived:
            """Wait as for a GPU."""
            if (wait_s := done_at_s - time.monotonic()) > 0:
                time.sleep(wait_s)
            return Arrived(array("i", [1]) * count, 0, 0, 0)

        return PendingStep(plan.step_id, arrive)

    @property
    def unprepared_count(self) -> int:
        """No size needs preparation."""
        return 0

    def prepare_next(self) -> bool:
        """There is nothing to prepare."""
        return False


def run() -> None:
    """Take the stub's own options, then be a worker whose engine is the stub."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--prompt-ms", type=float, default=0.0)
    parser.add_argument("--decode-ms", type=float, default=0.0)
    parser.add_argument("--token-us", type=float, default=0.0)
    args, sys.argv[1:] = parser.parse_known_args()
    runner = StubRunner(args.prompt_ms / 1e3, args.decode_ms / 1e3, args.token_us / 1e6)

    def load_engine(config: EngineConfig, compiler: CompileProcess | None) -> Engine:
        """The stub in the place of a model; named as no CPU, so that results take the GPU's way."""
        if compiler is not None:
            compiler.close()
        return Engine(runner, SIZE, VOCAB_SIZE, "a stand-in", "none")

    worker.load_engine = load_engine
    run_child("worker", main.main)


if __name__ == "__main__":
    run()
