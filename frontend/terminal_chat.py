"""A chat with the model in the terminal: `launch.py chat`, and the one answer of `--once`.

Answers go to stdout, everything else to stderr, so that a chat can be piped. Called by `frontend.terminal` and
`launcher.serve`.
"""

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from common.errors import RequestError
from frontend.client import Client

ANSWER_TOKENS = 512
ONCE_PARAMS = {"seed": 7, "max_tokens": ANSWER_TOKENS}
"""The model's own sampling defaults, and a seed, so that the same question gets the same answer."""
HELP = """\
  /system TEXT   begin anew with a system message     /clear    forget the talk so far
  /again         another answer to the last question  /help     this
  /exit, Ctrl-D  leave                                Ctrl-C    break off an answer
A line that ends with \\ goes on in the next one."""

Messages = list[dict[str, str]]


class Chat:
    """The talk so far, and how it goes on.

    Args:
        client: to the engine.
        params: sampling parameters of every answer.
        system: the first message, if any.
    """

    def __init__(self, client: Client, params: Mapping[str, Any], system: str = "") -> None:
        self.messages: Messages = []
        self._client = client
        self._params = params
        self._begin(system)

    def run(self) -> int:
        """Talk until the end of the input; returns the exit code."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() gets its history and its keys
        note(f"{self._client.welcome.model_names[0]}; /help for what there is, Ctrl-D to leave")
        while True:
            try:
                text = read_lines()
            except (EOFError, KeyboardInterrupt):
                note("")
                return 0
            if not self.take(text.strip()):
                return 0

    def take(self, text: str) -> bool:
        """A message or a command; False if it ends the talk."""
        word, _, rest = text.partition(" ")
        match word:
            case "":
                pass
            case "/exit" | "/quit":
                return False
            case "/clear":
                self._begin(self._system)
                note("forgotten")
            case "/system":
                self._begin(rest.strip())
            case "/again":
                self._again()
            case _ if word.startswith("/") and "/" not in word[1:]:
                if word != "/help":
                    note(f"there is no {word}")
                note(HELP)
            case _:
                self._ask({"role": "user", "content": text})
        return True

    def _begin(self, system: str) -> None:
        self._system = system
        self.messages[:] = [{"role": "system", "content": system}] if system else []

    def _again(self) -> None:
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            note("there is no question yet")
            return
        self.messages.pop()
        self._ask(self.messages.pop())

    def _ask(self, question: dict[str, str]) -> None:
        """Answer a question; one that is refused is not part of the talk."""
        self.messages.append(question)
        try:
            answer = stream_answer(self._client, self.messages, self._params, with_speed=sys.stderr.isatty())
        except RequestError as error:
            self.messages.pop()
            note(f"refused: {error}")
            if error.code == "context_length_exceeded":
                note("/clear forgets the talk so far")
        else:
            self.messages.append({"role": "assistant", "content": answer})


def read_lines() -> str:
    """A message from the input; a line that ends with a backslash goes on in the next."""
    lines = [_read_line("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_read_line(". "))
    return "\n".join(lines)


def _read_line(prompt: str) -> str:
    """A line after a prompt that only a person sees: where stdout is a file, the prompt is none of its content."""
    if not sys.stdin.isatty():
        return input()
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()


def note(text: str) -> None:
    """Something that is no answer, dimmed where it can be."""
    dim = sys.stderr.isatty() and text
    print(f"\033[2m{text}\033[0m" if dim else text, file=sys.stderr)


def answer_once(endpoint: str, prompt: str) -> None:
    """Ask one question and stream the answer to stdout."""
    with Client(endpoint) as client:
        stream_answer(client, [{"role": "user", "content": prompt}], ONCE_PARAMS)


def stream_answer(client: Client, messages: Messages, params: Mapping[str, Any], *, with_speed: bool = False) -> str:
    """Print the answer to a chat as it comes; returns the whole of it. Ctrl-C ends the answer, not the chat.

    Args:
        with_speed: a note after it says how many tokens it has and how fast they came.
    """
    text, token_count = "", 0
    began_s = first_s = time.monotonic()
    try:
        with client.chat(messages, params, stream=True) as stream:
            for delta in stream:
                first_s = first_s if token_count else time.monotonic()
                token_count += len(delta.token_ids)
                text += delta.text
                print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    ended_s = time.monotonic()
    print(flush=True)
    if with_speed and token_count > 1:
        rate = (token_count - 1) / max(ended_s - first_s, 1e-6)
        note(f"[{token_count} tokens, {rate:.0f} a second, the first after {(first_s - began_s) * 1000:.0f} ms]")
    return text
