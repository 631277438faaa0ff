"""`LLM`: a whole engine inside a program. Starts the processes, talks to them, stops them.

    llm = LLM("path/to/model", max_model_len=4096)
    for output in llm.generate(["The sea", "The sky"], SamplingParams(max_tokens=32)):
        print(output.prompt, output.outputs[0].text)

Calls and results have the same shape as vLLM's. The engine is `launch.py serve` without HTTP, as a child process; it
ends with this object, and with this program however that ends. Its log goes to the logger `trireme`, line by line with
its level, so that by default warnings and errors are seen. Errors are those of `client.Client`, and from the
constructor `StartupError` or `ConfigError` with the engine's own last line.
"""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from common import busy_poll
from common import client_messages as wire
from common.cli import config_from_options, to_arguments
from common.client_messages import TokenLogprob
from common.config import EngineConfig
from common.errors import EXIT_CODES, ConfigError, EngineDeadError, StartupError
from common.log import said
from common.sampling_params import SamplingParams
from frontend.client import Client
from frontend.client_requests import Params

START_POLL_S = 0.01
STOP_TIMEOUT_S = 15.0
LOG_TIMEOUT_S = 2.0
LAUNCH = Path(__file__).resolve().parent.parent / "launch.py"

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a map with `prompt_token_ids` or `prompt`."""
Conversation = Sequence[Mapping[str, Any]]

_LEVEL = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\{.*\"level\": \"(\w+)\"")
"""A line of the engine's log in either form."""

logger = logging.getLogger("trireme")


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
        logprobs: one entry per token, or None if not asked for.
        finish_reason: `stop`, `length` or `abort`.
        stop_reason: the stop string or stop token id that ended it, or None.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """The times at which a request arrived, got tokens and ended.

    Attributes:
        arrived_at_s: wall clock time of arrival in the engine.
        first_token_s, last_token_s, finished_s: seconds after that; None for what did not happen.
    """

    arrived_at_s: float
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float | None


@dataclass(frozen=True)
class RequestOutput:
    """A request's result.

    Attributes:
        prompt: the text, if the prompt was one.
        num_cached_tokens: how many of the prompt's tokens came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0
    finished: bool = field(default=True)


@dataclass(frozen=True)
class EmbeddingOutput:
    """A prompt's embedding: a vector of length 1."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The result of a request for an embedding.

    Attributes:
        prompt: the text, if the prompt was one.
        prompt_token_count: how many tokens it has.
        num_cached_tokens: how many of them came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    outputs: EmbeddingOutput
    prompt_token_count: int
    num_cached_tokens: int = 0
    finished: bool = field(default=True)


class LLM:
    """An engine inside this program.

    Args:
        model: model folder, .gguf file, hub id, or `default`.
        options: the engine's options by name, as on the command line with underscores: `max_model_len=4096`,
            `enforce_eager=True`, `device="cpu"`.

    Attributes:
        client: the connection to the engine, for streams and everything else that a `Client` can do.

    Raises:
        ConfigError: an unknown option, or a model that cannot be served.
        StartupError: the engine did not start.
    """

    def __init__(self, model: str = "default", **options: Any) -> None:
        config = config_from_options(**{"model": str(model), "http": False, **options})
        parent_read_fd, parent_write_fd = os.pipe()
        with tempfile.TemporaryDirectory(prefix="trireme-llm-") as folder:
            ready_file = Path(folder) / "ready.json"
            process = subprocess.Popen(
                [*command_line(config), "--ready-file", str(ready_file), "--parent-pipe", str(parent_read_fd)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(parent_read_fd,),
                start_new_session=True,  # Ctrl-C in this program's terminal is ours to deal with
            )
            os.close(parent_read_fd)
            self._process = process
            self._finalizer = weakref.finalize(self, _stop, process, parent_write_fd)
            assert process.stderr is not None
            log = EngineLog(process.stderr)
            try:
                ready = _wait_until_ready(process, ready_file, log)
            except BaseException:
                self._finalizer()
                raise
        poll_ms, poll_io = busy_poll.of_client_beside(config)
        self.client = Client(ready["local_endpoint"], name="LLM", busy_poll_ms=poll_ms, busy_poll_io=poll_io)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[SamplingParams] = None,
        *,
        use_tqdm: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt; all of them run together.

        Args:
            prompts: one or many: texts, lists of token ids, or maps with `prompt_token_ids`.
            sampling_params: one for all, one for each, or None for the model's defaults.
            use_tqdm: accepted for programs written for vLLM; there is no progress bar.
            options: as `Client.submit` has them: `priority`, `timeout_s`, `cache_salt`, ...

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError: a request was refused or failed; the others are aborted.
            EngineDeadError: the engine is gone.
        """
        self._check_alive()
        many = _as_many(prompts)
        finals = self.client.generate_batch(many, sampling_params, **options)
        return [_output(final, prompt, number) for number, (final, prompt) in enumerate(zip(finals, many, strict=True))]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[SamplingParams] = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        use_tqdm: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or many.

        Args:
            messages: a list of messages, or a list of such lists.
            sampling_params: one for all, one for each, or None for the model's defaults.
            tools: JSON descriptions of functions, for the chat template.
            chat_template_kwargs: further variables for the chat template.
            continue_final_message: continue the last message instead of answering it.
            use_tqdm: as in `generate`.
            options: as `Client.submit` has them.
        """
        self._check_alive()
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        finals = self.client.generate_batch(
            conversations, sampling_params, tools=tools, template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message, **options,
        )  # fmt: skip
        return [_output(final, None, number) for number, final in enumerate(finals)]

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = False, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """Embed each prompt; all of them run together.

        Args:
            prompts, use_tqdm: as in `generate`.
            options: as `Client.submit_embedding` has them: `pooling`, `priority`, `timeout_s`, ...

        Raises:
            RequestError, EngineDeadError: as in `generate`.
        """
        self._check_alive()
        many = _as_many(prompts)
        replies = self.client.embed_batch(many, **options)
        return [
            EmbeddingRequestOutput(
                str(number), _text(prompt), EmbeddingOutput(reply.embedding.tolist()), reply.prompt_tokens,
                reply.cached_tokens,
            )
            for number, (reply, prompt) in enumerate(zip(replies, many, strict=True))
        ]  # fmt: skip

    def close(self) -> None:
        """Stop the engine."""
        if hasattr(self, "client"):
            self.client.close()
        self._finalizer()

    def _check_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise EngineDeadError(f"the engine has ended with exit code {code}; make a new LLM")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineLog:
    """Passes the engine's log on to the logger `trireme`, in a thread of its own, until the engine has ended.

    Args:
        pipe: the engine's stderr; closed at its end.

    Attributes:
        last_line: the last that was not empty.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self.last_line = ""
        self._pipe = pipe
        self._level = logging.INFO
        self._thread = threading.Thread(target=self._run, name="engine-log", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the engine has ended and its log has been read."""
        self._thread.join(LOG_TIMEOUT_S)

    def _run(self) -> None:
        with self._pipe as pipe:
            for data in pipe:
                line = data.decode(errors="replace").rstrip()
                if line:
                    self.last_line = line
                    self._pass_on(line)

    def _pass_on(self, line: str) -> None:
        if found := _LEVEL.match(line):  # a line without a level, as in a traceback, belongs to the one before it
            self._level = logging.getLevelName((found[1] or found[2]).upper())
        logger.log(self._level, "%s", line)


def command_line(config: EngineConfig) -> list[str]:
    """The command that starts the engine."""
    return [sys.executable, str(LAUNCH), "serve", *to_arguments(config)]


def _wait_until_ready(process: "subprocess.Popen[bytes]", ready_file: Path, log: EngineLog) -> dict[str, Any]:
    while not ready_file.exists():
        code = process.poll()
        if code is not None:
            log.wait()
            last_line = log.last_line or "it said nothing"
            kind = ConfigError if code == EXIT_CODES[ConfigError] else StartupError
            raise kind(f"the engine did not start (exit code {code}): {said(last_line)}")
        time.sleep(START_POLL_S)
    ready: dict[str, Any] = json.loads(ready_file.read_text())
    return ready


def _stop(process: "subprocess.Popen[bytes]", parent_write_fd: int) -> None:
    """Stop the engine: closing the pipe tells it to; signals follow if it does not react.

    A signal at the same time would count as the second order to stop, which ends it without closing recordings.
    """
    with contextlib.suppress(OSError):
        os.close(parent_write_fd)
    for insist in (process.terminate, process.kill):
        try:
            process.wait(STOP_TIMEOUT_S)
            return
        except subprocess.TimeoutExpired:
            insist()
    process.wait()


def _as_many(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """A list of prompts; a single prompt (a text, a map, or a sequence of ids) becomes a list of one."""
    if isinstance(prompts, str | bytes | Mapping) or (len(prompts) and not hasattr(prompts[0], "__len__")):
        return [prompts]
    return prompts


def _text(prompt: Any) -> str | None:
    """The prompt's text, if it was given as one."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _output(final: wire.Final, prompt: Any, number: int) -> RequestOutput:
    return RequestOutput(
        request_id=str(number),
        prompt=_text(prompt),
        prompt_token_ids=list(final.prompt_token_ids),
        outputs=[
            CompletionOutput(
                sample.index,
                sample.text,
                list(sample.token_ids),
                sample.finish_reason,
                sample.stop_reason,
                sample.logprobs,
            )
            for sample in final.samples
        ],
        metrics=RequestMetrics(final.arrived_at_s, final.first_token_s, final.last_token_s, final.finished_s),
        prompt_logprobs=final.prompt_logprobs,
        num_cached_tokens=final.cached_tokens,
    )
