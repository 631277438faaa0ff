"""A scheduler without a model, behind the real sockets: for tests and measurements of the frontend alone.

Runs in a thread. In each step every live sample gets its next scripted token, all in one TokensOut, as the real
scheduler would report it. By default a sample's output is its prompt, over and over, so that its text is known.
"""

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import zmq

from common.config import EngineConfig
from common.messages import (
    AbortRequests,
    AddRequest,
    EngineReady,
    EngineStats,
    RequestFailed,
    SampleFinish,
    TokensOut,
    decode_for_scheduler,
)
from common.sockets import bind_pull, connect_push, new_context

LIMITS = EngineReady(max_model_len=2048, max_num_seqs=256, block_size=16, block_count=4096, vocab_size=400)

EMBEDDING = array("f", [0.6, 0.0, -0.8])
"""Every prompt's, if one is asked for."""

Script = Callable[[AddRequest, int], Iterator[int]]
"""The tokens of a request's sample with this index, from its first; its end, or `max_tokens`, ends the sample."""


def echo(request: AddRequest, sample_index: int) -> Iterator[int]:
    """The prompt, again and again."""
    return cycle(request.prompt_token_ids)


@dataclass
class _Sample:
    request: AddRequest
    index: int
    tokens: Iterator[int]
    token_count: int = 0


class FakeScheduler(threading.Thread):
    """Answers a frontend until `close`.

    Args:
        config: names the sockets.
        script: what each sample says.
        limits: what EngineReady announces.
        step_interval_s: time from one step to the next; 0 steps as fast as it can.
        is_held: the gate is closed at first.

    Attributes:
        gate: steps are taken only while it is set; messages are read all the time.
        close_at: the gate closes when a sample has so many tokens; None for never.
        added, aborted: what came, in order.
        refusal: answers every request instead of running it, if set.
        garbage: goes to the frontend in place of the next step's tokens, if set.
    """

    def __init__(
        self,
        config: EngineConfig,
        script: Script = echo,
        limits: EngineReady = LIMITS,
        step_interval_s: float = 0.0,
        is_held: bool = False,
    ) -> None:
        super().__init__(name="fake-scheduler", daemon=True)
        self.gate = threading.Event()
        self.close_at: int | None = None
        if not is_held:
            self.gate.set()
        self.added: list[AddRequest] = []
        self.aborted: list[int] = []
        self.refusal: tuple[str, str, int] | None = None
        self.garbage: bytes | None = None
        self.changed = threading.Condition()
        self._config = config
        self._script = script
        self._limits = limits
        self._step_interval_s = step_interval_s
        self._live: dict[int, list[_Sample]] = {}
        self._closing = False
        self.start()

    @property
    def live_count(self) -> int:
        """Requests that run."""
        return len(self._live)

    def advance(self, live_count: int, token_count: int) -> None:
        """Once so many requests run, have them run on together until they have so many tokens; then the gate closes."""
        self.wait_until(lambda: self.live_count == live_count)
        self.close_at = token_count
        self.gate.set()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 20) -> None:
        """Block until something holds that messages bring about."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), "the frontend did not send what was waited for"

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self.join()

    def run(self) -> None:
        """The thread: read what there is, take a step, again."""
        context = new_context()
        requests = bind_pull(context, self._config.endpoint("requests"))
        outputs = connect_push(context, self._config.endpoint("outputs"))
        outputs.send(self._limits.to_wire())
        due_s: float | None = None  # when the next step is to be taken; None while there is none
        while not self._closing:
            if not self._live or not self.gate.is_set():
                due_s = None
            elif due_s is None:
                due_s = time.monotonic()
            wait_s = 0.01 if due_s is None else max(0.0, due_s - time.monotonic())
            if requests.poll(wait_s * 1000):
                self._read(requests, outputs)
            elif due_s is not None:
                outputs.send(self._step().to_wire() if self.garbage is None else self.garbage)
                due_s = max(due_s, time.monotonic() - self._step_interval_s) + self._step_interval_s
        outputs.close()
        requests.close()
        context.term()

    def _read(self, requests: "zmq.Socket[bytes]", outputs: "zmq.Socket[bytes]") -> None:
        with self.changed:
            while requests.poll(0):
                match decode_for_scheduler(requests.recv()):
                    case AddRequest() as request:
                        self.added.append(request)
                        if self.refusal:
                            code, message, status = self.refusal
                            outputs.send(RequestFailed(request.request_id, code, message, status).to_wire())
                        else:
                            self._live[request.request_id] = self._samples(request)
                    case AbortRequests() as aborts:
                        self.aborted.extend(aborts.request_ids)
                        for request_id in aborts.request_ids:
                            self._live.pop(request_id, None)
            outputs.send(EngineStats(running_count=len(self._live)).to_wire())
            self.changed.notify_all()

    def _samples(self, request: AddRequest) -> list[_Sample]:
        """Those that run, each from where it stands."""
        open_samples = [(index, len(output)) for index, output in request.open_samples()]
        return [
            _Sample(request, index, islice(self._script(request, index), count, None), count)
            for index, count in open_samples
        ]

    def _step(self) -> TokensOut:
        request_ids, sample_indices, counts = array("i"), array("B"), array("B")
        token_ids, cached_counts, finishes, embeddings = array("i"), array("i"), [], []
        for request_id, samples in list(self._live.items()):
            request = samples[0].request
            for sample in list(samples):
                row_index = len(request_ids)
                token_id = next(sample.tokens, None)
                request_ids.append(request_id)
                sample_indices.append(sample.index)
                counts.append(token_id is not None)
                cached_counts.append(0 if sample.token_count == 0 else -1)
                if request.pooling:
                    embeddings.append((row_index, EMBEDDING))
                if token_id is not None:
                    token_ids.append(token_id)
                    sample.token_count += 1
                    if sample.token_count == self.close_at:
                        self.gate.clear()
                if reason := _end(sample, token_id):
                    finishes.append(SampleFinish(row_index, reason))
                    samples.remove(sample)
            if not samples:
                del self._live[request_id]
        return TokensOut(
            request_ids=request_ids,
            sample_indices=sample_indices if any(sample_indices) else array("B"),
            token_counts=counts if not all(counts) else array("B"),
            cached_counts=cached_counts if max(cached_counts) >= 0 else array("i"),
            token_ids=token_ids,
            finishes=tuple(finishes),
            embeddings=tuple(embeddings),
        )


def _end(sample: _Sample, token_id: int | None) -> str:
    params = sample.request.params
    if token_id is not None and token_id in sample.request.end_token_ids and sample.token_count > params.min_tokens:
        return "stop"
    return "length" if token_id is None or sample.token_count == params.max_tokens else ""
