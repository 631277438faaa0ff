"""The cost of structured outputs in the scheduler: reading the vocabulary, compiling a grammar, and each token's mask.

`python -m benchmarks.grammar --tokenizer FILE` follows JSON texts under their schema and times every `Grammar.advance`:
the token goes into the matcher, the mask for the next one comes out. Ends with one JSON line.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from benchmarks import records
from common.messages import AddRequest
from common.sampling_params import SamplingParams
from scheduler_proc.grammar import Grammars

TARGETS = {"mask_us_p50": 30.0}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "number": {"type": "integer"}}},
        "tags": {"type": "array", "items": {"type": "string"}},
        "state": {"enum": ["new", "known", "gone"]},
    },
    "required": ["name", "age", "address", "tags", "state"],
    "additionalProperties": False,
}
TEXT = json.dumps(
    {
        "name": "Ada Lovelace of London",
        "age": 36,
        "address": {"street": "St James's Square, near the park", "number": 12},
        "tags": ["mathematics", "engines that compute", "poetry \u00e0 la mode"],
        "state": "known",
    },
    ensure_ascii=False,
)
DEMANDS: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"json": SCHEMA}, TEXT),
    "json_object": ({"json_object": True}, TEXT),
    "regex": ({"regex": r"[A-Z][a-z]+( [a-z]+){3,20}\."}, "Ships go over the blue and open sea at night."),
}


def small_tokenizer(folder: Path) -> Path:
    """A byte-level vocabulary of a few hundred tokens, for the smoke run."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def measure(tokenizer_file: Path, repeats: int) -> dict[str, Any]:
    """All figures for one vocabulary."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    grammars = Grammars(tokenizer_file, vocab_size)
    started = time.perf_counter()
    grammars.compile(SamplingParams(structured_outputs={"choice": ["yes"]}).structured_outputs)
    metrics: dict[str, Any] = {
        "vocab_size": vocab_size,
        "vocabulary_ms": round(1000 * (time.perf_counter() - started), 1),
    }
    for name, (wanted, text) in DEMANDS.items():
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        metrics[name] = follow(grammars, wanted, token_ids, repeats)
    return metrics


def follow(grammars: Grammars, wanted: dict[str, Any], token_ids: list[int], repeats: int) -> dict[str, float]:
    """Times of one grammar: its compilation, a request's start, and microseconds for each token."""
    message = AddRequest(
        request_id=1, prompt_token_ids=array("i", [1]), params=SamplingParams(structured_outputs=wanted)
    )  # fmt: skip
    started = time.perf_counter_ns()
    grammars.compile(message.params.structured_outputs)
    compiled = time.perf_counter_ns()
    first_times, times = [], []
    for repeat in range(repeats):
        start = time.perf_counter_ns()
        grammar = grammars.start(message)
        first_times.append(time.perf_counter_ns() - start)
        for token_id in token_ids:
            before = time.perf_counter_ns()
            goes_on = grammar.advance(token_id)
            if repeat:  # the first pass builds what later ones find
                times.append(time.perf_counter_ns() - before)
            if not goes_on:
                break
    quantiles = statistics.quantiles(times, n=100)
    return {
        "compile_ms": round((compiled - started) / 1e6, 2),
        "start_us": round(statistics.median(first_times) / 1e3, 1),
        "mask_us_p50": round(statistics.median(times) / 1e3, 1),
        "mask_us_p99": round(quantiles[98] / 1e3, 1),
        "mask_us_mean": round(statistics.mean(times) / 1e3, 1),
    }


def main() -> None:
    """Parse, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", help="a tokenizer.json; without it a small one is made")
    parser.add_argument("--smoke", action="store_true", help="a second, for the test suite")
    parser.add_argument("--output", help="file to append the result to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(args.tokenizer) if args.tokenizer else small_tokenizer(Path(folder))
        metrics = measure(file, 3 if args.smoke else 40)
    for name, figures in metrics.items():
        print(f"{name:<14} {figures}", file=sys.stderr)
    entry = records.record(
        benchmark="grammar", workload="json", metrics=metrics, device=records.host_name(), limit=TARGETS
    )
    records.finish(entry, args.output)


if __name__ == "__main__":
    main()
