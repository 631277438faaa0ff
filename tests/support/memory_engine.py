"""The real scheduler core and the real runner in one process, without sockets: for tests that need many configurations.

Every plan and every result crosses the wire format, up to `run_ahead + 1` plans are in flight, and when the engine is
idle the scheduler's state is recounted (check 1 of the fault list). Unused KV memory holds NaN.
"""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.config import StepLimits
from common.messages import (
    AbortRequests,
    AddRequest,
    RequestFailed,
    StepResult,
    TokensOut,
    decode_for_frontend,
    decode_for_scheduler,
    decode_for_worker,
    decode_from_worker,
)
from common.sampling_params import SamplingParams
from scheduler_proc.core import SchedulerCore
from scheduler_proc.grammar import Grammars
from scheduler_proc.state import Limits
from tests.support.poison import poison
from worker_proc.engine import StepRunner
from worker_proc.kv_cache import KVCache, cache_specs
from worker_proc.models.llama import LlamaForCausalLM
from worker_proc.pending import PendingStep
from worker_proc.runner import CpuRunner

EMBEDDING = SamplingParams(max_tokens=1, temperature=0.0)
LIMITS = Limits(max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64, block_size=4, block_count=400)


@dataclass
class Sample:
    """What came back for one sample of a request; `logprobs` one tuple a token, where it asked for them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple] = field(default_factory=list)
    finish: str = ""
    embedding: "array[float] | None" = None
    cached_count: int = -1
    prompt_logprobs: list[float] = field(default_factory=list)


class MemoryEngine:
    """Takes requests, runs steps until all are done. Plans are issued as they are made, ahead of earlier results.

    Args:
        model: in its final form.
        tokenizer_file: the model's tokenizer.json, for structured outputs.
        kv_cache_dtype: as the option.
        make_runner: (model, cache, step limits, max_model_len, vocabulary) -> the runner; the CPU's if None.
        limits: what differs from `LIMITS`.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        tokenizer_file: Path | None = None,
        *,
        kv_cache_dtype: str = "auto",
        make_runner: Callable[..., StepRunner] = CpuRunner,
        **limits: object,
    ) -> None:
        self.limits = replace(LIMITS, **limits)
        self._model, self._kv_cache_dtype, self._make_runner = model, kv_cache_dtype, make_runner
        self._grammars = None if tokenizer_file is None else Grammars(tokenizer_file, model.config.vocab_size)
        self.samples: dict[tuple[int, int], Sample] = {}
        self.failures: dict[int, RequestFailed] = {}
        self._requests: dict[int, AddRequest] = {}
        self._next_id = 0
        self._start()

    def _start(self) -> None:
        """A scheduler and a worker that know nothing yet."""
        model = self._model
        cache = KVCache(
            cache_specs(model.config, model.model.norm.weight.dtype, self._kv_cache_dtype),
            block_size=self.limits.block_size,
            block_count=self.limits.block_count,
            host_block_count=self.limits.host_block_count,
            device=model.model.norm.weight.device,
        )
        poison(cache)
        step_limits = StepLimits(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        self.runner = self._make_runner(model, cache, step_limits, self.limits.max_model_len, model.config.vocab_size)
        self.core = SchedulerCore(self.limits, clock=lambda: 0.0, grammars=self._grammars)
        self.swapped_in = 0
        self._in_flight: deque[PendingStep] = deque()

    def add(
        self, prompt: list[int], params: SamplingParams, end_token_ids: tuple[int, ...] = (), pooling: str = ""
    ) -> int:
        """Submit a request; its id."""
        request_id = self._next_id
        self._next_id += 1
        message = AddRequest(
            request_id=request_id, prompt_token_ids=array("i", prompt), params=params, end_token_ids=end_token_ids,
            pooling=pooling,
        )  # fmt: skip
        self._requests[request_id] = message
        for index in range(params.n):
            self.samples[request_id, index] = Sample()
        self._hear(self.core.handle(decode_for_scheduler(message.to_wire())))
        return request_id

    def restart(self) -> None:
        """Lose scheduler and worker with all that is in flight; requests go on from what was heard of them."""
        self._start()
        for request_id, message in self._requests.items():
            samples = [self.samples[request_id, index] for index in range(message.params.n)]
            if request_id not in self.failures and not all(sample.finish for sample in samples):
                outputs = tuple(None if s.finish else array("i", s.token_ids) for s in samples)
                self._hear(self.core.handle(decode_for_scheduler(replace(message, outputs=outputs).to_wire())))

    def abort(self, request_id: int) -> None:
        """Abort a request; known or not."""
        self._hear(self.core.handle(decode_for_scheduler(AbortRequests(array("i", [request_id])).to_wire())))

    def step(self) -> bool:
        """Issue until the pipeline is full, then take in the oldest result; False when there was nothing to do."""
        while (plan := self.core.plan_step()) is not None:
            self.swapped_in += len(plan.swap_in_block_ids) // 2
            self._in_flight.append(self.runner.execute(decode_for_worker(plan.to_wire())))
        if not self._in_flight:
            return False
        result: StepResult = self._in_flight.popleft().result()
        self._hear(self.core.handle_result(decode_from_worker(result.to_wire())))
        return True

    def run(self) -> None:
        """Step until idle, then recount."""
        while self.step():
            pass
        assert self.core.is_idle
        self.core.check()

    def generate(self, prompts: list[list[int]], max_tokens: int = 64, **params: object) -> list[list[int]]:
        """Greedy unless told otherwise; the tokens of each prompt's first sample."""
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})
        ids = [self.add(prompt, sampling) for prompt in prompts]
        self.run()
        return [self.samples[request_id, 0].token_ids for request_id in ids]

    def embed(self, prompts: list[list[int]], pooling: str) -> "list[array[float]]":
        """The embedding of each prompt."""
        ids = [self.add(prompt, EMBEDDING, pooling=pooling) for prompt in prompts]
        self.run()
        return [self.samples[request_id, 0].embedding for request_id in ids]

    def _hear(self, messages: list) -> None:
        for message in messages:
            received = decode_for_frontend(message.to_wire())
            if isinstance(received, RequestFailed):
                assert received.request_id not in self.failures, "a second terminal message"
                self.failures[received.request_id] = received
            elif isinstance(received, TokensOut):
                self._take(received)

    def _take(self, out: TokensOut) -> None:
        for row, entries in out.prompt_logprobs:
            assert not self.samples[out.request_ids[row], 0].prompt_logprobs, "reported twice"
            self.samples[out.request_ids[row], 0].prompt_logprobs = [entry.logprob for entry in entries]
        for row, embedding in out.embeddings:
            self.samples[out.request_ids[row], 0].embedding = embedding
        start, places = 0, {entry.row_index: entry for entry in out.logprobs}
        for row, request_id in enumerate(out.request_ids):
            sample = self.samples[request_id, out.sample_indices[row] if out.sample_indices else 0]
            assert not sample.finish, f"tokens after the end of request {request_id}"
            count = out.token_counts[row] if out.token_counts else 1
            sample.token_ids += out.token_ids[start : start + count]
            found = (places[place] for place in range(start, start + count) if place in places)
            sample.logprobs += [(e.logprob, e.rank, *e.top_token_ids, *e.top_logprobs) for e in found]
            start += count
            if out.cached_counts and out.cached_counts[row] >= 0:
                sample.cached_count = out.cached_counts[row]
        for finish in out.finishes:
            index = out.sample_indices[finish.row_index] if out.sample_indices else 0
            self.samples[out.request_ids[finish.row_index], index].finish = finish.reason
