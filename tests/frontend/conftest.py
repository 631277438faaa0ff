"""Small tokenizers of both families; the frontend in memory, and running between its real sockets."""

from array import array

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from common.sampling_params import SamplingParams
from frontend.tokenizer import Tokenizer
from tests.support import tiny
from tests.support.frontend_in_memory import Events, FrontendInMemory
from tests.support.running_frontend import RunningFrontend

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


@pytest.fixture
def memory_engine(byte_tokenizer):
    running = FrontendInMemory(byte_tokenizer)
    yield running
    running.engine.close()


@pytest.fixture
def submit(memory_engine):
    """Submits a prompt and gives the events."""

    def make(prompt=(5, 6), stream=True, engine=memory_engine, **params):
        options = {
            name: params.pop(name)
            for name in ("starts_text", "exact_max_tokens", "timeout_s", "resumed", "pooling")
            if name in params
        }
        events = Events()
        ids = engine.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else array("i", prompt)
        sampling = SamplingParams(**{"max_tokens": 64, **params})
        events.request = engine.core.submit(ids, sampling, events, stream=stream, **options)
        return events

    return make


@pytest.fixture
def run_frontend(tmp_path_factory):
    """Starts a frontend with the given server options and scheduler script, and stops it after the test; with `after`
    the successor of one that was lost."""
    made = []

    def make(after: RunningFrontend | None = None, **script) -> RunningFrontend:
        made.append(after.again(**script) if after else RunningFrontend(tmp_path_factory.mktemp("f"), **script))
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
