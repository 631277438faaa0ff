"""The loss of quality of an 8-bit KV cache, compared with the same model in float32.

    python -m benchmarks.quality --output benchmarks/results/quality.jsonl
    python -m benchmarks.quality --smoke            # seconds, for the test suite

Four measurements of each variant (float32 throughout; and, in the device's own type, a plain, an int8 and an fp8
cache):

- perplexity: English text (the topics of the standard library's pydoc) in windows, each token after all before it;
- greedy: how far greedy answers to prompts from that text agree with float32's;
- attention: each layer's output on the queries, keys and values that it sees in float32, cosine and largest error;
- needle: facts hidden in a text as long as the model's context, asked for at its end.

One JSON line for each measurement and variant (benchmarks/records.py); `limit` has the largest loss that is accepted.
"""

import argparse
import math
import os
import pydoc_data.topics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the worker does, see worker_proc/main.py

import torch
from tokenizers import Tokenizer

from benchmarks import records
from benchmarks.paged_model import PagedModel
from common.processors import granted_cores
from worker_proc.attention import attention
from worker_proc.engine import choose_device, set_threads
from worker_proc.fetch_model import fetch_model
from worker_proc.loader import load_model, resolve_dtype
from worker_proc.model_config import read_model_config
from worker_proc.models import llama
from worker_proc.models.llama import LlamaForCausalLM

LIMITS_PERCENT = {"int8": 0.5, "fp8": 1.0}
"""How much higher than the plain cache's the perplexity may be."""

CITIES = ("Paris", "Cairo", "Lima", "Oslo", "Delhi", "Rome", "Kyoto", "Accra", "Quito", "Berlin")
MEASUREMENTS = ("perplexity", "greedy", "attention", "needle")


@dataclass(frozen=True)
class Variant:
    """What is measured: its name, and the type of the KV cache under `dtype` arithmetic."""

    name: str
    dtype: torch.dtype
    kv_cache_dtype: str


class Quality:
    """The measurements, on one model and one text."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder, self.device = Path(fetch_model(options.model)), choose_device(options.device)
        self.config = read_model_config(self.folder)
        dtype = resolve_dtype(options.dtype, self.config, self.device)
        self.variants = [Variant("float32", torch.float32, "auto")]
        self.variants += [Variant(name, dtype, name) for name in ("auto", "int8", "fp8")]
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        topics = pydoc_data.topics.topics
        self.text = self.encode("\n\n".join(topics[name] for name in sorted(topics)))
        self.models: dict[torch.dtype, LlamaForCausalLM] = {}
        self.results: list[dict[str, Any]] = []

    def encode(self, text: str) -> list[int]:
        """Token ids, without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def model(self, dtype: torch.dtype) -> LlamaForCausalLM:
        """The model, loaded once for each type."""
        if dtype not in self.models:
            self.models[dtype] = load_model(self.folder, device=self.device, dtype=dtype)
        return self.models[dtype]

    def paged(self, variant: Variant, row_count: int, max_tokens: int) -> PagedModel:
        """The variant's model over an empty cache."""
        return PagedModel(self.model(variant.dtype), variant.kv_cache_dtype, row_count, max_tokens)

    def add(self, measurement: str, variant: Variant, metrics: dict[str, Any], **limit: Any) -> None:
        """Keep a result, print it, and write it where it was asked for."""
        options = {name: value for name, value in vars(self.options).items() if name not in ("output", "only")}
        entry = records.record(
            benchmark="quality", workload=measurement, metrics=metrics, limit=limit,
            model=records.model_label(self.options.model), weights="real",
            options=options | {"variant": variant.name, "dtype": str(variant.dtype).removeprefix("torch.")},
            device=f"{records.processor_name()}, {granted_cores():g} cores" if self.device.type == "cpu" else "",
        )  # fmt: skip
        self.results.append(entry)
        if self.options.output:
            records.save([entry], self.options.output)
        shown = {name: value for name, value in metrics.items() if not isinstance(value, list)}
        print(f"{measurement:<11} {variant.name:<8} {shown}", flush=True)

    def perplexity(self) -> None:
        """Of the text's windows; every token but a window's first counts."""
        losses: dict[str, list[float]] = {}
        for variant in self.variants:
            start_s = time.monotonic()
            limit = self.options.float32_tokens if variant.name == "float32" else self.options.tokens
            losses[variant.name] = self.window_losses(variant, limit)
            metrics = {
                "perplexity": round(perplexity_of(losses[variant.name]), 4),
                "tokens": len(losses[variant.name]) * (self.options.window - 1),
                **percent_over(losses, variant.name), "seconds": round(time.monotonic() - start_s, 1),
            }  # fmt: skip
            allowed = LIMITS_PERCENT.get(variant.name)
            self.add("perplexity", variant, metrics, **({} if allowed is None else {"percent_over_auto": allowed}))

    def window_losses(self, variant: Variant, limit: int) -> list[float]:
        """Mean negative log likelihood of each window of the text's first `limit` tokens, in nats."""
        window, losses = self.options.window, []
        paged = self.paged(variant, 1, window)
        for start in range(0, min(limit, len(self.text)) - window + 1, window):
            ids = self.text[start : start + window]
            paged.lengths[0] = 0
            losses.append(-float(paged.log_likelihoods(paged.step([ids])[:-1], ids[1:]).double().mean()))
        return losses

    def greedy(self) -> None:
        """Agreement of greedy answers with float32's, and with those of the plain cache."""
        count, length, output = self.options.prompts, self.options.prompt_tokens, self.options.output_tokens
        stride = (len(self.text) - length) // count
        prompts = [self.text[index * stride : index * stride + length] for index in range(count)]
        answers: dict[str, list[list[int]]] = {}
        for variant in self.variants:
            answers[variant.name] = self.paged(variant, count, length + output).greedy(prompts, output)
            metrics = {
                f"{key}_of_{other}": value
                for other in ("float32", "auto") if other in answers and other != variant.name
                for key, value in agreement(answers[variant.name], answers[other]).items()
            }  # fmt: skip
            if metrics:  # the first is what the others are held against
                self.add("greedy", variant, metrics)

    def attention(self) -> None:
        """Each layer's attention on the same queries, keys and values, stored in each type."""
        tokens = self.text[: self.options.attention_tokens]
        exact = self.paged(self.variants[0], 1, len(tokens))
        others = {variant: self.paged(variant, 1, len(tokens)) for variant in self.variants[1:]}
        contexts = {variant: paged.context([len(tokens)])[0] for variant, paged in others.items()}
        layers: dict[Variant, list[tuple[float, float]]] = {variant: [] for variant in others}

        def compare(query, key, value, layer_index, context, **options):
            output = attention(query, key, value, layer_index, context, **options)
            for variant, other in contexts.items():
                parts = (tensor.to(variant.dtype) for tensor in (query, key, value))
                found = attention(*parts, layer_index, other, **options).double()
                cosine = torch.cosine_similarity(found.flatten(), output.double().flatten(), dim=0)
                layers[variant].append((float(cosine), float((found - output).abs().max())))
            return output

        with replaced(llama, "attention", compare):
            exact.step([tokens])
        for variant, found in layers.items():
            cosines, errors = zip(*found, strict=True)
            metrics = {
                "worst_cosine": round(min(cosines), 6), "mean_cosine": round(sum(cosines) / len(cosines), 6),
                "max_abs_error": round(max(errors), 5), "cosines": [round(value, 6) for value in cosines],
                "max_abs_errors": [round(value, 5) for value in errors],
            }  # fmt: skip
            self.add("attention", variant, metrics)

    def needle(self) -> None:
        """Which of the facts hidden in a full context are found, and how likely the right answers are."""
        room = min(self.options.context, self.config.context_limit)
        facts = [(city, self.encode(f"\nThe magic number of {city} is"), self.encode(f" {3571 + 577 * index}"))
                 for index, city in enumerate(CITIES[: self.options.needles])]  # fmt: skip
        tail = max(len(question) + len(answer) for _, question, answer in facts)
        haystack = self.haystack(facts, room - tail)
        for variant in self.variants:
            paged, found, likelihoods = self.paged(variant, 1, room), [], []
            for start in range(0, len(haystack), self.options.chunk):
                paged.step([haystack[start : start + self.options.chunk]])
            for city, question, answer in facts:
                paged.lengths[0] = len(haystack)
                hidden = paged.step([question + answer[:-1]])[len(question) - 1 :]
                likelihoods.append(float(paged.log_likelihoods(hidden, answer).sum()))
                if paged.model.compute_logits(hidden).argmax(-1).tolist() == answer:
                    found.append(city)
            metrics = {
                "found": len(found), "needles": len(facts), "context": room, "cities": found,
                "mean_log_likelihood": round(sum(likelihoods) / len(likelihoods), 4),
            }  # fmt: skip
            self.add("needle", variant, metrics)

    def haystack(self, facts: list[tuple[str, list[int], list[int]]], length: int) -> list[int]:
        """The text with the facts spread over it evenly, `length` tokens in all."""
        needles = [question + answer + self.encode(".\n") for _, question, answer in facts]
        filling = length - sum(map(len, needles))
        text = (self.text * (1 + filling // len(self.text)))[:filling]
        cuts = [round(filling * (index + 0.5) / len(needles)) for index in range(len(needles))]
        parts, before = [], 0
        for cut, needle in zip(cuts, needles, strict=True):
            parts += [*text[before:cut], *needle]
            before = cut
        return parts + text[before:]


def perplexity_of(losses: list[float]) -> float:
    """Of windows with those mean losses."""
    return math.exp(sum(losses) / len(losses))


def percent_over(losses: dict[str, list[float]], name: str) -> dict[str, float]:
    """How much higher one variant's perplexity is than that of each measured before it, on the windows of both."""
    over = {}
    for other, others in losses.items():
        shared = min(len(losses[name]), len(others))
        ratio = perplexity_of(losses[name][:shared]) / perplexity_of(others[:shared])
        if other in ("float32", "auto") and other != name:
            over[f"percent_over_{other}"] = round(100 * (ratio - 1), 4)
    return over


def agreement(found: list[list[int]], wanted: list[list[int]]) -> dict[str, float]:
    """Share of answers that are the same throughout, of tokens, and the mean length of what agrees from the start."""
    pairs = list(zip(found, wanted, strict=True))
    same = [[a == b for a, b in zip(*pair, strict=True)] for pair in pairs]
    prefixes = [row.index(False) if False in row else len(row) for row in same]
    return {
        "same_answers": round(sum(map(all, same)) / len(same), 4),
        "same_tokens": round(sum(map(sum, same)) / sum(map(len, same)), 4),
        "mean_same_prefix": round(sum(prefixes) / len(prefixes), 2),
    }


class replaced:
    """Another value for a module's name while the block runs."""

    def __init__(self, module: Any, name: str, value: Callable[..., Any]) -> None:
        self.module, self.name, self.value = module, name, value

    def __enter__(self) -> None:
        self.kept = getattr(self.module, self.name)
        setattr(self.module, self.name, self.value)

    def __exit__(self, *_: object) -> None:
        setattr(self.module, self.name, self.kept)


SMOKE = {
    "tokens": 128, "float32_tokens": 64, "window": 32, "prompts": 3, "prompt_tokens": 12, "output_tokens": 6,
    "attention_tokens": 40, "context": 400, "chunk": 100, "needles": 2,
}  # fmt: skip


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="of every variant but float32")
    parser.add_argument("--tokens", type=int, default=112_640, help="of text, for the perplexity")
    parser.add_argument("--float32-tokens", type=int, default=112_640, help="the same for float32, which is slow")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--attention-tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=1 << 20, help="of the needles; at most the model's")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of the haystack that are computed at once")
    parser.add_argument("--needles", type=int, default=len(CITIES))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="measurements, with commas between")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--output", type=Path, default=None, help="append JSON lines to this file")
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(SMOKE)
    return options


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print, keep; returns the records."""
    options = parse_arguments(arguments)
    set_threads(options.threads)
    with torch.inference_mode():
        quality = Quality(options)
        for name in options.only.split(","):
            getattr(quality, name)()
    return quality.results


if __name__ == "__main__":
    main()
