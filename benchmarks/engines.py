"""The engines that workloads run on, behind one interface: ours, transformers, vLLM.

Each takes token ids and output lengths, runs them as one batch of requests, and says when each request got its first
and its last token. An engine that is not installed raises ImportError with the package's name.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.stand_in import write_stand_in_tokenizer
from benchmarks.workloads import Workload
from common.messages import STEP_PARTS

TEMPERATURE = 0.6
PREPARED_POLL_S = 0.1
PREPARED_LIMIT_S = 300
"""On a GPU, this engine takes requests at once and captures most of its graphs in pauses, which takes seconds, behind a
first start's compilation a minute; others capture theirs before they take any."""


@dataclass(frozen=True)
class RequestTiming:
    """One request: when it was submitted, got its first token, got its last; and how many tokens that were."""

    submitted_s: float
    first_token_s: float
    last_token_s: float
    output_count: int

    @property
    def ttft_ms(self) -> float:
        """Time to the first token, in ms."""
        return (self.first_token_s - self.submitted_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first, in ms; None for a single token."""
        if self.output_count < 2:
            return None
        return (self.last_token_s - self.first_token_s) * 1e3 / (self.output_count - 1)


class Engine(Protocol):
    """What a benchmark needs of an engine.

    Attributes:
        max_len: tokens that a request may have, prompt and output together; 0 where the engine does not tell.
    """

    name: str
    options: dict[str, Any]
    max_len: int

    def run(self, workload: Workload) -> list[RequestTiming]:
        """Run all requests of a workload at once and time them."""

    def step_parts_us(self) -> dict[str, float]:
        """Mean microseconds of the parts of a step since the last call; empty where the engine does not tell."""

    def close(self) -> None:
        """Stop the engine."""


class TriremeEngine:
    """This engine, through its real processes and the `LLM` class."""

    name = "trireme"

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from frontend import LLM

        self.options = options
        write_stand_in_tokenizer(Path(model))
        self._llm = LLM(model, **{"prefix_cache": "off", **options})
        self._figures: dict[str, int] = {}
        try:
            limits = self._llm.client.status().limits
            self.max_len = min(limits["max_model_len"], limits["block_count"] * limits["block_size"] + 1)
            wait_until_prepared(lambda: self._llm.client.status().figures["unprepared_count"])
        except BaseException:
            self.close()
            raise

    def run(self, workload: Workload) -> list[RequestTiming]:
        """Submit all prompts as one `generate` call."""
        from frontend import SamplingParams

        submitted_s, outputs = _generated(self._llm, SamplingParams, workload)
        timings = []
        for output, wanted in zip(outputs, workload[1], strict=True):
            count = len(output.outputs[0].token_ids)
            if count != wanted:
                raise RuntimeError(f"wanted {wanted} tokens, got {count} ({output.outputs[0].finish_reason})")
            metrics = output.metrics
            first_s, last_s = (
                metrics.arrived_at_s + after_s for after_s in (metrics.first_token_s, metrics.last_token_s)
            )
            timings.append(RequestTiming(submitted_s, first_s, last_s, count))
        return timings

    def step_parts_us(self) -> dict[str, float]:
        """The engine's own account of its steps."""
        figures = self._llm.client.status().figures
        since = {name: value - self._figures.get(name, 0) for name, value in figures.items()}
        self._figures = dict(figures)
        steps = max(1, since["steps"])
        return {part: since[f"step_{part}_us"] / steps for part in STEP_PARTS} | {"steps": float(since["steps"])}

    def close(self) -> None:
        """Stop the processes."""
        self._llm.close()


def wait_until_prepared(unprepared_count: Callable[[], int], sleep: Callable[[float], None] = time.sleep) -> None:
    """Leave an engine alone until it has nothing more to prepare in pauses.

    Raises:
        TimeoutError: it still had something after PREPARED_LIMIT_S.
    """
    for _ in range(round(PREPARED_LIMIT_S / PREPARED_POLL_S)):
        if not (count := unprepared_count()):
            return
        sleep(PREPARED_POLL_S)
    raise TimeoutError(f"after {PREPARED_LIMIT_S} s the engine has {count} sizes of steps left to prepare")


class TransformersEngine:
    """`transformers` generate, one padded batch: what people have without an engine."""

    name, max_len = "transformers", 0

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self.options = options
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, options.get("dtype", "float32"))
        if options.get("load_format") == "dummy":
            torch.manual_seed(0)
            loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=dtype)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self._model = loaded.to(self._device).eval()

    def run(self, workload: Workload) -> list[RequestTiming]:
        """Left-pad the prompts to one batch and generate the longest output; the first token is timed by a streamer."""
        import torch

        prompts, output_lens = workload
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        clock = _FirstTokenClock()
        submitted_s = time.time()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=TEMPERATURE,
                max_new_tokens=max(output_lens),
                min_new_tokens=max(output_lens),
                pad_token_id=0,
                stopping_criteria=[clock],
            )
        ended_s = time.time()
        return [RequestTiming(submitted_s, clock.first_s or ended_s, ended_s, count) for count in output_lens]

    def step_parts_us(self) -> dict[str, float]:
        """Not told."""
        return {}

    def close(self) -> None:
        """Nothing runs."""


class _FirstTokenClock:
    """A stopping criterion that never stops and notes when it is first asked: after the first token."""

    def __init__(self) -> None:
        self.first_s: float | None = None

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        import torch

        self.first_s = self.first_s or time.time()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class VllmEngine:
    """vLLM's offline class, where it is installed."""

    name, max_len = "vllm", 0

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.options = options
        known = {key: value for key, value in options.items() if key in ("dtype", "load_format", "max_model_len")}
        self._llm = LLM(model, enable_prefix_caching=False, disable_log_stats=False, **known)

    def run(self, workload: Workload) -> list[RequestTiming]:
        """Submit all prompts as one `generate` call."""
        from vllm import SamplingParams

        submitted_s, outputs = _generated(self._llm, SamplingParams, workload, use_tqdm=False)
        ended_s = time.time()
        timings = []
        for output, count in zip(outputs, workload[1], strict=True):
            metrics = output.metrics
            ttft_s = getattr(metrics, "first_token_latency", None) or ended_s - submitted_s
            timings.append(RequestTiming(submitted_s, submitted_s + ttft_s, ended_s, count))
        return timings

    def step_parts_us(self) -> dict[str, float]:
        """Not told."""
        return {}

    def close(self) -> None:
        """Free the GPU for the next engine."""
        del self._llm


def _generated(llm: Any, sampling_params: Any, workload: Workload, **options: Any) -> tuple[float, list[Any]]:
    """When a workload was submitted, and its outputs: the same call of our class and of vLLM's."""
    prompts, output_lens = workload
    params = [
        sampling_params(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count, detokenize=False)
        for count in output_lens
    ]
    submitted_s = time.time()
    return submitted_s, llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, **options)


ENGINES = {"trireme": TriremeEngine, "transformers": TransformersEngine, "vllm": VllmEngine}
