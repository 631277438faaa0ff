"""From an engine's start to its first token, and how much it can cache then: a first start, and one after it.

    python -m benchmarks.startup --model benchmarks/models/qwen3-0.6b --load-format dummy
    python -m benchmarks.startup ... --kv-cache-dtypes auto int8 fp8

A new Python process imports the SDK, starts the engine's processes and asks for one token after 128. The clock runs
from before that process is started until it has the token. For `first_s` no kernel has been compiled before: Triton's
folder is an empty one. `next_s` is the same again, with what the first start has left there. `kv_blocks`: of the cache
that the engine made in the memory it was given. Ends with one JSON line for each type of cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import records
from benchmarks.arguments import named_value

PROMPT_TOKENS = 128
TIMEOUT_S = 300

ENGINE = """
import json, sys
from pathlib import Path
from benchmarks.stand_in import write_stand_in_tokenizer
from frontend import LLM, SamplingParams
model, options = json.loads(sys.argv[1])
if model != "default":
    write_stand_in_tokenizer(Path(model))
if __name__ == "__main__":
    with LLM(model, **options) as llm:
        llm.generate([list(range(2, 2 + %d))], SamplingParams(max_tokens=1, ignore_eos=True))
        print("blocks", llm.client.status().limits["block_count"], flush=True)
        sys.stdin.read()
"""
"""What a user's program would do. It waits for its end once the token is there, so that the clock can be read."""


def start(model: str, options: dict[str, Any], environment: dict[str, str]) -> tuple[float, int]:
    """Seconds until the first token, and blocks of the cache.

    Raises RuntimeError with what the engine said if there is no token.
    """
    started_s = time.perf_counter()
    command = [sys.executable, "-c", ENGINE % PROMPT_TOKENS, json.dumps([model, options])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    ) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        words = next((line.split() for line in engine.stdout if line.startswith("blocks ")), None)
        took_s = time.perf_counter() - started_s
        engine.stdin.close()
        code = engine.wait(TIMEOUT_S)
    if words is None or code:
        raise RuntimeError(f"the engine gave no token and ended with code {code}; what it said is above")
    return took_s, int(words[1])


def measure(model: str, options: dict[str, Any]) -> dict[str, float]:
    """Both starts, the kernels compiled by the first in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="trireme-startup-") as folder:
        environment = {"TRITON_CACHE_DIR": folder}
        first_s, blocks = start(model, options, environment)
        next_s, _ = start(model, options, environment)
    return {"first_s": round(first_s, 2), "next_s": round(next_s, 2), "kv_blocks": blocks}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each type of cache, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", default="default", help="model folder or hub id (default: the embedded model)")
    add("--load-format", default="auto", choices=("auto", "dummy"), help="dummy draws random weights")
    add("--kv-cache-dtypes", nargs="+", default=["auto"], choices=("auto", "int8", "fp8"))
    add(
        "--option",
        action="append",
        type=named_value,
        default=[],
        metavar="NAME=VALUE",
        help="further options, such as max_model_len=4096",
    )
    add("--output", default=str(records.RESULTS_DIR / "startup.jsonl"), help="JSON lines to append to; '' keeps none")
    args = parser.parse_args(arguments)
    records.check_output(args.output)
    for kv_cache_dtype in args.kv_cache_dtypes:
        options = {"load_format": args.load_format, "kv_cache_dtype": kv_cache_dtype} | dict(args.option)
        entry = records.record(
            benchmark="startup", workload="first_token", model=records.model_label(args.model),
            weights="random" if args.load_format == "dummy" else "real", metrics=measure(args.model, options),
            options=options,
        )  # fmt: skip
        records.finish(entry, args.output)


if __name__ == "__main__":
    main()
