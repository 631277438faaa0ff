"""The device's part of a step, from the packed plan to sampled ids, in one call per bucket: run as it is or as a graph.

A graph is captured at the start, in a pause, or when its bucket must be used (20 to 30 ms, see `docs/log.md`), and
replayed from then on. All buffers stay where they are, so a graph holds no memory of its own beyond the library's
workspace. Steps whose graph cannot be captured run without one. Knows no plans and no requests. Called by the GPU
runner.
"""

import logging
from contextlib import suppress
from dataclasses import fields
from typing import Protocol

import torch

from kernels.sampling import SampledTokens, sample
from kernels.sampling_state import SamplingWorkspace
from kernels.scatter_words import scatter_words
from kernels.step_inputs import step_inputs
from kernels.step_layout import HEADER, WRITE_COUNT, PlanLayout, StepInputs
from worker_proc.cuda.buckets import DECODE, Bucket
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.kv_cache import KVCache

GRAPH_LIMIT = 256
"""Graphs that are kept at most; 14 are captured at the start and 139 in pauses, with the default limits. Steps of
further buckets run without one, if none stands in."""

logger = logging.getLogger(__name__)


class CaptureError(RuntimeError):
    """A step could not be recorded as a CUDA Graph."""

    def __init__(self, bucket: Bucket, cause: Exception) -> None:
        reason = (str(cause) or type(cause).__name__).splitlines()[0]
        super().__init__(
            f"the CUDA Graph of {bucket.kind} steps with {bucket.rows} rows and {bucket.tokens} tokens cannot be "
            f"captured: {reason}; --enforce-eager runs without graphs"
        )


class Forward(Protocol):
    """A forward pass in buffers of its own: `FusedForward`, `FixedOrderForward` or `PlainForward`.

    Attributes:
        capturable: whether a graph can hold it.
        fixed_order: whether a token's bits depend on its own request alone.
    """

    capturable: bool
    fixed_order: bool

    def run(
        self, bucket: Bucket, inputs: StepInputs, cache: KVCache, slots: DeviceSlots, counts: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the rows that sample, float32 [rows, vocab_size]; the other lines hold anything."""

    def shortened(self) -> "Forward":
        """A pass in the same buffers that takes every kernel of this one, but not every layer."""

    def token_logits(self, first_token: int, count: int) -> torch.Tensor:
        """Logits of any tokens of the last pass, float32 [count, vocab_size]; its bucket was one of `every_token`."""

    def token_hidden(self, first_token: int, count: int) -> torch.Tensor:
        """Hidden states of any tokens of the last pass, after the last norm, [count, hidden_size]; of such a pass."""


class StepProgram:
    """Steps of one worker.

    Args:
        plan: int32, the device buffer that starts with the packed plan.
        vocabulary: ids from here on are never sampled.
        eager: run every step without a graph.

    Attributes:
        sampled: of the last step, a line per row.
    """

    def __init__(
        self, forward: Forward, cache: KVCache, slots: DeviceSlots, plan: torch.Tensor, layout: PlanLayout,
        *, max_tokens: int, vocabulary: int, eager: bool,
    ) -> None:  # fmt: skip
        self._forward, self._cache, self._slots = forward, cache, slots
        self._plan, self._layout, self._vocabulary = plan, layout, vocabulary
        device = plan.device
        self._inputs = StepInputs.allocate(layout.rows, max_tokens, device)
        self._workspace = SamplingWorkspace.allocate(layout.rows, vocabulary, device)
        self.sampled = SampledTokens.allocate(layout.rows, 1, device)
        self.uses_graphs = forward.capturable and not eager and device.type == "cuda"
        self._graphs: dict[tuple[Bucket, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._without_graph: set[Bucket] = set()
        self._broken: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle() if self.uses_graphs else None

    @property
    def graph_count(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def run(self, bucket: Bucket, *, sampling: bool = True) -> torch.Tensor:
        """Run the step whose plan is in the buffer; returns its logits, float32 [rows, vocab_size].

        Without `sampling` the caller changes the logits and then calls `sample`.
        """
        captured = self._graphs.get((bucket, sampling)) or self._graph_for_step(bucket, sampling)
        if captured is None:
            return self._run(self._forward, bucket, sampling)
        graph, logits = captured
        graph.replay()
        return logits

    def has_graph(self, bucket: Bucket) -> bool:
        """Whether the bucket has been captured, with its sampling."""
        return (bucket, True) in self._graphs

    def takes_graph(self, bucket: Bucket) -> bool:
        """Whether the bucket may still be captured: there is room for a graph, and it has not failed before."""
        return bucket not in self._without_graph and len(self._graphs) < GRAPH_LIMIT

    def stand_in(self, bucket: Bucket) -> Bucket | None:
        """The captured bucket that holds such steps with the least padding, and computes what they ask for."""
        asked = (bucket.kind, bucket.every_token)
        captured = (each for each, sampling in self._graphs if sampling and (each.kind, each.every_token) == asked)
        found = (each for each in captured if each.rows >= bucket.rows and each.tokens >= bucket.tokens)
        return min(found, key=lambda each: (each.tokens, each.rows), default=None)

    def prepare(self, bucket: Bucket) -> None:
        """Have what a bucket's steps need: the graph, or at least the kernels. One whose capture has failed in a step
        has run without a graph since, and has its kernels.

        Raises:
            CaptureError: there will be no graph.
        """
        if not self.uses_graphs:
            self.rehearse(bucket)
        elif self.takes_graph(bucket):
            self._graph(bucket, sampling=True)

    def rehearse(self, bucket: Bucket) -> None:
        """Run every kernel of a bucket's step once, eagerly and on an empty plan, without going through all layers."""
        header = self._plan[:HEADER]
        kept = header.clone()
        header.zero_()
        try:
            self._run(self._forward.shortened(), bucket, sampling=True)
        finally:
            header.copy_(kept)

    def write_slots(self) -> None:
        """Carry out the plan's writes to the slots now, for what reads them before the step, which then makes none."""
        scatter_words(self._slots.memory, self._plan, self._layout)
        self._plan[WRITE_COUNT].zero_()

    def sample(self, bucket: Bucket, logits: torch.Tensor) -> None:
        """Choose the rows' tokens, write them to `sampled` and to their slots."""
        inputs, slots = self.inputs(bucket), self._slots
        whole = self.sampled
        out = SampledTokens(**{item.name: getattr(whole, item.name)[: bucket.rows] for item in fields(whole)})
        sample(
            logits, inputs.row_slots, inputs.sample_rows, slots.known_lengths, slots.token_ids, slots.sampling,
            self._workspace, out, self._vocabulary,
        )  # fmt: skip

    def inputs(self, bucket: Bucket) -> StepInputs:
        """The step's inputs, padded to the bucket."""
        return self._inputs.bucket(bucket.rows, bucket.tokens)

    def token_logits(self, first_token: int, count: int) -> torch.Tensor:
        """Logits of any tokens of the last step, whose bucket was one of `every_token`."""
        return self._forward.token_logits(first_token, count)

    def _run(self, forward: Forward, bucket: Bucket, sampling: bool) -> torch.Tensor:
        inputs = self.inputs(bucket)
        if bucket.kind != DECODE:
            scatter_words(self._slots.memory, self._plan, self._layout)
        step_inputs(self._plan, self._layout, self._slots.state, inputs, self._slots.block_size)
        logits = forward.run(bucket, inputs, self._cache, self._slots, self._plan[:3])
        if sampling:
            self.sample(bucket, logits)
        return logits

    def _graph_for_step(self, bucket: Bucket, sampling: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor] | None:
        """What the first step of a bucket replays; None if it runs without a graph, as it does where one failed."""
        if not (self.uses_graphs and self.takes_graph(bucket)):
            return None
        try:
            return self._graph(bucket, sampling)
        except CaptureError as error:
            logger.warning("%s; until then only such steps do", error)
            self._without_graph.add(bucket)
            return None

    def _graph(self, bucket: Bucket, sampling: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        key = (bucket, sampling)
        if key not in self._graphs:
            self._graphs[key] = self._capture(bucket, sampling)
        return self._graphs[key]

    def _capture(self, bucket: Bucket, sampling: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Record the bucket's step. The rehearsal loads its kernels, and compiles those that are not compiled yet.

        Raises:
            CaptureError: that failed; nothing is kept of it.
        """
        cause: Exception | None = None
        graph, stream = torch.cuda.CUDAGraph(), None if self._pool is None else torch.cuda.current_stream()
        try:
            self.rehearse(bucket)
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                try:
                    logits = self._run(self._forward, bucket, sampling)
                except Exception as error:
                    cause = error  # ending the capture raises another error, which says less
                    raise
        except Exception as error:
            if stream is not None:
                self._after_failure(graph, stream)
            raise CaptureError(bucket, cause or error) from (cause or error)
        return graph, logits

    def _after_failure(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        """Put right what torch leaves behind where a capture could not even be ended, or do nothing.

        Its own stream is current then, and its allocators go on with the capture: they keep the pool, ask the graph
        which stream it is on, and refuse to empty the cache, which the next capture begins with.
        """
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError, AttributeError):  # the capture was ended, or the function has gone
            torch.cuda.memory._cuda_endAllocateToPool(stream.device_index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        self._broken.append(graph)
