"""Small tokenizers of both families, an engine in memory, and a whole frontend with a scripted scheduler behind it."""

import asyncio
import dataclasses
import os
import queue
import threading
from array import array
from types import SimpleNamespace

import hypothesis
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from benchmarks.fake_scheduler import LIMITS, FakeScheduler
from common import messages as m
from common.config import EngineConfig, LogOptions, ServerOptions
from common.sampling_params import SamplingParams
from frontend.engine import Engine
from frontend.events import Delta
from frontend.tokenizer import Tokenizer
from tests.support import tiny

hypothesis.settings.register_profile("trireme", deadline=None)  # other programs on the machine are no fault of ours
hypothesis.settings.load_profile("trireme")

SENTENCES = [
    "hello world, this is the open sea",
    "the alphabet: ABC DEFGHIJ KLM",
    "naïve café 海は青い 🌊🙂",
    "a b c d e f",
]


def byte_level() -> Tokenizer:
    """A byte-level BPE tokenizer, as GPT-2, Llama 3 and Qwen have."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(SENTENCES, trainer)
    return Tokenizer(raw, {"config.json": {"eos_token_id": 1}}, tiny.CHAT_TEMPLATE)


def byte_fallback() -> Tokenizer:
    """A SentencePiece-like tokenizer with byte fallback, as Llama 2 and Mistral have."""
    pieces = ["▁", "▁I", "▁love", "▁you", "▁the", "▁sea", "l", "o", "v", "e", "y", "u", "t", "h", "s", "a", ",", "é"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{value:02X}>": 3 + value for value in range(256)}
    vocabulary |= {piece: 259 + number for number, piece in enumerate(pieces)}
    raw = RawTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(raw, {"config.json": {"eos_token_id": 2}})


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def fallback_tokenizer() -> Tokenizer:
    return byte_fallback()


class MemoryEngine:
    """An engine whose messages to the scheduler gather in a list, and which is fed by hand.

    Attributes:
        sent: decoded messages, in order.
    """

    def __init__(self, tokenizer: Tokenizer, log: LogOptions = LogOptions(), **server: object) -> None:  # noqa: B008
        self.sent: list = []
        config = EngineConfig(server=ServerOptions(**server), log=log)
        self.engine = Engine(config, tokenizer, lambda data: self.sent.append(m.decode_for_scheduler(data)))
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

    def on_token(self, sample_index, text, token_id) -> None:
        self.on_delta(Delta(sample_index, text, array("i", [token_id])))

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


@pytest.fixture
def memory_engine(byte_tokenizer):
    running = MemoryEngine(byte_tokenizer)
    yield running
    running.engine.close()


@pytest.fixture
def submit(memory_engine, helpers):
    """Submits a prompt and gives the events."""

    def make(prompt=(5, 6), stream=True, engine=memory_engine, **params):
        options = {
            name: params.pop(name) for name in ("starts_text", "exact_max_tokens", "timeout_s") if name in params
        }
        events = helpers.Events()
        ids = engine.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else array("i", prompt)
        sampling = SamplingParams(**{"max_tokens": 64, **params})
        events.request = engine.core.submit(ids, sampling, events, stream=stream, **options)
        return events

    return make


class FakeLink:
    """A supervisor link that the test gives orders through."""

    def __init__(self) -> None:
        self.wake_fd, self._write_fd = os.pipe()
        os.set_blocking(self.wake_fd, False)
        self.progress = 0
        self.is_ready = threading.Event()
        self.detail = ""
        self._orders: queue.SimpleQueue = queue.SimpleQueue()

    def ready(self, detail: str) -> None:
        self.detail = detail
        self.is_ready.set()

    def failed(self, message: str) -> None:
        self.detail = message

    def set_state(self, state: str) -> None:
        self.state = state

    def profile(self, order: m.Profile) -> None:
        self.order(order)

    def order(self, order) -> None:
        self._orders.put(order)
        os.write(self._write_fd, b"x")

    def take_orders(self) -> list:
        os.read(self.wake_fd, 4096)
        orders = []
        while not self._orders.empty():
            orders.append(self._orders.get())
        return orders

    def close(self) -> None:
        os.close(self.wake_fd)
        os.close(self._write_fd)


class RunningFrontend(threading.Thread):
    """The real frontend in a thread: its own sockets and event loop, a scripted scheduler, orders by hand.

    Args:
        folder: an empty one.
        server: server options that differ from the usual.
        script: what the scheduler does.
    """

    def __init__(self, folder, server=None, **script) -> None:
        super().__init__(name="frontend", daemon=True)
        model_dir = folder / "model"
        model_dir.mkdir()
        tiny.save_tokenizer(model_dir)
        options = ServerOptions(**{"http": False, "client_endpoint": f"ipc://{folder}/client.sock", **(server or {})})
        self.config = EngineConfig(server=options, run_dir=str(folder), model_dir=str(model_dir))
        self.endpoint = options.client_endpoint
        self.link = FakeLink()
        self.exit_code: int | None = None
        self.scheduler = FakeScheduler(self.config, **script)
        self.start()
        assert self.link.is_ready.wait(30), "the frontend did not get ready"

    def run(self) -> None:
        from frontend.main import Frontend

        async def main() -> int:
            self.frontend = Frontend(self.config, self.link)
            return await self.frontend.run()

        self.exit_code = asyncio.run(main())

    def stop(self, grace_ms: int = 0) -> int | None:
        """Order the stop and wait for the end."""
        if self.is_alive():
            self.link.order(m.Stop(grace_ms))
        self.join(30)
        assert not self.is_alive(), "the frontend did not stop"
        return self.exit_code

    def close(self) -> None:
        self.stop()
        self.scheduler.close()
        self.link.close()


@pytest.fixture
def run_frontend(tmp_path_factory):
    """Makes a `RunningFrontend`; scripted as asked."""
    made = []

    def make(**script) -> RunningFrontend:
        made.append(RunningFrontend(tmp_path_factory.mktemp("f"), **script))
        return made[-1]

    yield make
    for running in made:
        running.close()


@pytest.fixture
def frontend(run_frontend):
    """A frontend whose model says the prompt over and over."""
    return run_frontend()


@pytest.fixture(scope="module")
def shared_frontend(tmp_path_factory):
    """One for all tests of a module that leave it as it was."""
    running = RunningFrontend(tmp_path_factory.mktemp("f"))
    yield running
    running.close()


@pytest.fixture(scope="session")
def running_frontend():
    """The class, for fixtures that live longer than a test."""
    return RunningFrontend


@pytest.fixture(scope="session")
def helpers():
    """The classes of this file, for tests that make their own."""
    return SimpleNamespace(MemoryEngine=MemoryEngine, Events=Events)
