"""Grammars of structured outputs: which tokens a sequence may sample next, as one bit per token id.

    Grammars     the model's vocabulary and the grammars compiled so far; made at the start, loads nothing until needed
    Grammar      where one sequence is in its grammar, and the mask for its next token
    Compilation  requests on their way to the core whose grammar is being compiled in a thread

llguidance does the work. It is imported, and the vocabulary read, when the first such request comes. Called by the
core, the collector and the process main.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.child import READING_VOCABULARY
from common.errors import TriremeError
from common.messages import AbortRequests, AddRequest, ForScheduler, RequestFailed
from common.structured_outputs import WHITESPACE, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILED_LIMIT = 128
"""Grammars kept for the next request that wants the same."""
ANNOUNCEMENT_S = 0.05
"""The heartbeat that announces the reading of the vocabulary gets so much time to leave."""
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class GrammarError(TriremeError):
    """A grammar that cannot be compiled, or that fails while it is followed; the text says why."""


class Grammar:
    """Where one sequence stands in its grammar.

    Args:
        matcher: before the first token; not shared.
        own_end_ids: the end tokens that the matcher itself allows when the grammar is satisfied.
        end_ids: the tokens that end this request.
        min_count: output tokens before which no end token may come.
        allowed_ids: the only ids that the request allows; None for all.

    Attributes:
        mask: for the next token, little-endian words of 32 bits.

    Raises:
        GrammarError: nothing can be sampled at the start.
    """

    __slots__ = ("_allowed", "_count", "_end_bits", "_matcher", "_min_count", "_own_end_bits", "mask")

    def __init__(
        self,
        matcher: "LLMatcher",
        own_end_ids: Iterable[int],
        end_ids: Iterable[int],
        min_count: int = 0,
        allowed_ids: Iterable[int] | None = None,
    ) -> None:
        self._matcher = matcher
        self._own_end_bits, self._end_bits = _bits(own_end_ids), _bits(end_ids)
        self._min_count, self._count = min_count, 0
        self._allowed = None if allowed_ids is None else _bits(allowed_ids)
        self.mask = b""
        if not self._look_ahead():
            raise GrammarError("it allows no token at the start of the output")

    def advance(self, *token_ids: int) -> bool:
        """Take the token that was sampled, or an output that is there already, and set the mask for the next one.

        Masks are most of the work, so an output is taken at once.

        Returns:
            False if the output is complete: nothing, or nothing but its end, can follow.

        Raises:
            GrammarError: the grammar does not allow the tokens, or has become too complex.
        """
        self._count += len(token_ids)
        if not self._matcher.consume_tokens(list(token_ids)):
            raise GrammarError(_reason(self._matcher))
        return not self._matcher.is_stopped() and self._look_ahead()

    def _look_ahead(self) -> bool:
        """Set the mask; False if it is empty."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(_reason(self._matcher))
        accepting = self._matcher.is_accepting()
        if not accepting and self._allowed is None:
            self.mask = mask  # the usual case: an open grammar allows no end token, and never nothing
            return True
        bits = int.from_bytes(mask, "little")
        if accepting:
            bits &= ~self._own_end_bits
            bits = bits | self._end_bits if self._count >= self._min_count else bits & ~self._end_bits
        if self._allowed is not None:
            bits &= self._allowed
        self.mask = bits.to_bytes(len(mask), "little")
        return bits != 0


class Grammars:
    """Makes grammars for one vocabulary. Safe to use from several threads.

    Args:
        tokenizer_file: the model's tokenizer.json.
        vocab_size: token ids that the model's logits cover.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int) -> None:
        self.tokenizer_file, self._vocab_size = tokenizer_file, vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: dict[tuple[str, str], LLMatcher | GrammarError] = {}

    def compile(self, wanted: StructuredOutputs) -> "LLMatcher":
        """The grammar's matcher, to be copied; compiled if it is not kept from before.

        Raises:
            GrammarError: it is not valid, or too complex.
        """
        found = self._compiled.get(wanted.key)
        if found is None:
            with self._lock:
                found = self._compiled[wanted.key] = self._try_compile(wanted)
                if len(self._compiled) > COMPILED_LIMIT:
                    del self._compiled[next(iter(self._compiled))]
        if isinstance(found, GrammarError):
            raise found
        return found

    def start(self, message: AddRequest, output: Sequence[int] = ()) -> Grammar:
        """A sample's grammar, after the output that the sample has already.

        Raises:
            GrammarError: as `compile`, or nothing can be sampled.
        """
        params = message.params
        assert params.structured_outputs is not None, f"request {message.request_id} has no grammar"
        matcher = self.compile(params.structured_outputs).deep_copy()
        assert self._tokenizer is not None, "a matcher without a tokenizer"
        grammar = Grammar(
            matcher, self._tokenizer.eos_tokens, message.end_token_ids, params.min_tokens, params.allowed_token_ids
        )
        if output and not grammar.advance(*output):
            raise GrammarError("the output is complete already")
        return grammar

    def _try_compile(self, wanted: StructuredOutputs) -> "LLMatcher | GrammarError":
        from llguidance import LLMatcher

        try:
            self._tokenizer = self._tokenizer or load_tokenizer(self.tokenizer_file, self._vocab_size)
            matcher = LLMatcher(self._tokenizer, grammar_text(wanted), log_level=0)
        except GrammarError as error:
            return error
        except MemoryError:  # not kept: the next time there may be some
            raise GrammarError("there is no memory for it") from None
        except BaseException as error:  # the library raises whatever it likes, and panics
            return GrammarError(str(error)[:2000])
        return GrammarError(_reason(matcher)) if matcher.is_error() else matcher


def _reason(matcher: "LLMatcher") -> str:
    """What is wrong, without the state of llguidance's parser: that is long, and has times in it."""
    return matcher.get_error().partition("\n<state>")[0][:2000] or "the tokens do not follow it"


def load_tokenizer(file: Path, vocab_size: int) -> "LLTokenizer":
    """llguidance's view of a tokenizer.json, with which text that the grammar leaves no choice about is written in the
    tokens that the model knows. In two steps, since each holds the interpreter for a part of a second.

    Raises:
        GrammarError: there is no such file.
    """
    from llguidance import LLTokenizer

    if not file.is_file():
        raise GrammarError(f"structured outputs need a tokenizer.json, and there is none in {file.parent}")
    plain = LLTokenizer(str(file), n_vocab=vocab_size, slices=[])
    return plain.with_slices(LLTokenizer.general_slices())


def grammar_text(wanted: StructuredOutputs) -> str:
    """The grammar as llguidance takes it.

    Raises:
        ValueError: a GBNF grammar that cannot be translated.
    """
    from llguidance import LLMatcher, grammar_from

    kind, text = wanted.key
    if kind == "json":
        schema = json.loads(text)
        return LLMatcher.grammar_from_json_schema(
            schema if isinstance(schema, dict) else {"anyOf": [{}]} if schema else {"not": {}},
            defaults={"whitespace_pattern": WHITESPACE},
        )
    if kind == "grammar":
        return grammar_from("gbnf" if _GBNF_RULE.search(text) else "lark", text)
    return grammar_from("regex" if kind == "regex" else "choice", text)


class Compilation:
    """Requests whose grammar is being compiled; everything else passes through at once.

    Args:
        grammars: where the core finds them afterwards.
        set_state: tells the supervisor, before the vocabulary is read, that heartbeats may be missing, and afterwards
            that all is as usual again.
        observe: wraps the count of requests that are ready, the one thing here that depends on another thread, so that
            it can be recorded and replayed.
    """

    def __init__(
        self,
        grammars: Grammars,
        set_state: Callable[[str], None] = lambda state: None,
        observe: Callable[[Callable[[], float]], Callable[[], float]] = lambda count: count,
    ) -> None:
        self._set_state = set_state
        self._grammars = grammars
        self._ready_count = observe(self._count_ready)
        self._released: set[tuple[str, str]] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._has_vocabulary = False
        self._held: dict[int, tuple[AddRequest, Future[Any]]] = {}

    @property
    def is_idle(self) -> bool:
        """Nothing is held."""
        return not self._held

    def pass_on(self, message: ForScheduler) -> bool:
        """Whether the core may have the message now; a request that must wait is kept for `ready`."""
        if isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self._held.pop(request_id, None)
        if not isinstance(message, AddRequest) or message.params.structured_outputs is None:
            return True
        wanted = message.params.structured_outputs
        if wanted.key in self._released:
            return True
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            self._set_state(READING_VOCABULARY)
            self._threads.submit(time.sleep, ANNOUNCEMENT_S)
        self._held[message.request_id] = message, self._threads.submit(self._grammars.compile, wanted)
        return False

    def ready(self) -> list[AddRequest]:
        """Requests whose grammar is there, or known to be wrong, in the order of their arrival."""
        if not self._held:
            return []
        ready = list(self._held.values())[: int(self._ready_count())]
        for message, compiling in ready:
            compiling.exception()  # waits, in a replay; what is wrong with a grammar the core finds out
            self._release(message)
        return [message for message, _ in ready]

    def forget_all(self) -> None:
        """Nobody wants what is held any more."""
        self._held.clear()

    def fail_all(self, error_code: str, text: str) -> list[RequestFailed]:
        """An end for everything that is still held."""
        held, self._held = list(self._held), {}
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        return [RequestFailed(request_id, error_code, text, status=503) for request_id in held]

    def _count_ready(self) -> int:
        """How many of the held requests, from the first on, are ready: one thread compiles them in order."""
        waiting = (place for place, (_, compiling) in enumerate(self._held.values()) if not compiling.done())
        return next(waiting, len(self._held))

    def _release(self, message: AddRequest) -> None:
        del self._held[message.request_id]
        assert message.params.structured_outputs is not None, "only requests with a grammar are held"
        if not self._has_vocabulary:
            self._has_vocabulary = True
            self._set_state("serving")
        if len(self._released) >= COMPILED_LIMIT // 2:
            self._released.clear()
        self._released.add(message.params.structured_outputs.key)


def _bits(token_ids: Iterable[int]) -> int:
    bits = 0
    for token_id in token_ids:
        bits |= 1 << token_id
    return bits
