"""The frontend's engine in memory, with the test as its scheduler, and a sink that keeps what a request gets."""

import dataclasses
from array import array

from benchmarks.fake_scheduler import LIMITS
from common import messages as m
from common.config import EngineConfig, LogOptions, ServerOptions
from frontend.engine import Engine
from frontend.events import Delta
from frontend.tokenizer import Tokenizer


class FrontendInMemory:
    """The frontend's engine without sockets: the test reads what it sends to the scheduler, and hands it the results.

    Attributes:
        sent: decoded messages, in order.
    """

    def __init__(self, tokenizer: Tokenizer, log: LogOptions = LogOptions(), **server: object) -> None:  # noqa: B008
        self.sent: list = []
        config = EngineConfig(server=ServerOptions(**server), log=log)
        self.engine = Engine(config, tokenizer, lambda data, more=False: self.sent.append(m.decode_for_scheduler(data)))
        self.core = self.engine.core
        self.core.handle(LIMITS)

    def tokens(self, request_id: int, token_ids, *, sample_index: int = 0, finish: str | None = None, **more) -> None:
        """One row of one step."""
        ids = array("i", token_ids)
        self.core.handle(
            m.TokensOut(
                request_ids=array("i", [request_id]),
                token_ids=ids,
                sample_indices=array("B", [sample_index]) if sample_index else array("B"),
                token_counts=array("B", [len(ids)]) if len(ids) != 1 else array("B"),
                finishes=(m.SampleFinish(0, finish),) if finish else (),
                **more,
            )
        )

    def say(self, events: "Events", text: str, finish: str | None = None, sample_index: int = 0) -> None:
        """The model says a text, one token a step."""
        token_ids = self.engine.tokenizer.encode(text)
        for position, token_id in enumerate(token_ids):
            last = finish if position == len(token_ids) - 1 else None
            self.tokens(events.request.request_id, [token_id], finish=last, sample_index=sample_index)


class Events:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.deltas: list = []
        self.ends: list = []

    def on_token(self, sample_index, piece) -> None:
        self.on_delta(Delta(sample_index, piece.text, array("i", [piece.token_id])))

    def on_delta(self, delta) -> None:
        assert not self.ends, "a delta came after the end"
        self.deltas.append(dataclasses.replace(delta))

    def on_final(self, final) -> None:
        self.ends.append(final)

    def on_failed(self, error) -> None:
        self.ends.append(error)

    @property
    def end(self):
        assert len(self.ends) == 1, f"wanted exactly one end, got {self.ends}"
        return self.ends[0]

    def text(self, sample_index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.sample_index == sample_index)
