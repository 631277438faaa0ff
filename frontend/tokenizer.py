"""The model's tokenizer: text to token ids, token ids to bytes, chats to text.

Knows nothing of requests or sockets. The frontend's main loads one at start; nothing here changes afterwards, so
threads may share it.

It uses the raw `tokenizers.Tokenizer` (tokenizer.json), which loads in a fraction of a second. `transformers` is
imported only to render a chat, or if a folder has no tokenizer.json and one must be converted.
"""

import json
import os
import re
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from common.errors import ConfigError, RequestError
from common.model_files import read_object, read_text
from common.sampling_params import SamplingParams
from common.wire import INT32_MAX
from frontend.chat.roles import check_roles
from frontend.chat.tool_formats import knows_tools
from frontend.chat.tools import for_template
from frontend.detokenizer import ByteDetokenizer, ByteTable, Detokenizer, WindowDetokenizer
from frontend.prompt import ChatPrompt

GENERATION_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What generation_config.json may set -> the sampling parameter it is the default of."""

OTHER_FORMS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
"""Files that a tokenizer without tokenizer.json is made of."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's tokenizer, special tokens, chat template and sampling defaults.

    Args:
        raw: the tokenizer itself.
        folder_files: the parsed JSON files of the model's folder by name (missing ones are empty).
        chat_template: a Jinja template, or a map of them by name; empty if the model has none.

    Attributes:
        vocab_size: ids from 0 to this minus one may stand for text.
        end_token_ids: ids that end the output, sorted: those of generation_config.json, config.json and the tokenizer.
        special_token_ids: ids that `skip_special_tokens` leaves out of the text.
        sampling_defaults: sampling parameters that generation_config.json sets.
    """

    def __init__(
        self,
        raw: RawTokenizer,
        folder_files: Mapping[str, dict[str, Any]] | None = None,
        chat_template: str | dict[str, str] = "",
    ) -> None:
        files = folder_files or {}
        self.raw = raw
        self.chat_template = chat_template
        self._settings = files.get("tokenizer_config.json", {})
        added = raw.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = raw.get_vocab_size(with_added_tokens=True)
        self.end_token_ids = self._end_token_ids(files)
        self.sampling_defaults = _sampling_defaults(files.get("generation_config.json", {}))
        self._all_bytes, self._text_bytes = self._byte_tables()

    @classmethod
    def load(cls, folder: str | Path, chat_template_file: str = "") -> "Tokenizer":
        """Load from a model's folder.

        Raises:
            ConfigError: no tokenizer there, or a file that cannot be read.
        """
        path = Path(folder)
        files = {
            name: read_object(path / name, missing_ok=True)
            for name in ("tokenizer_config.json", "generation_config.json", "config.json")
        }
        template = _chat_template(path, files["tokenizer_config.json"], chat_template_file)
        return cls(_load_raw(path), files, template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> "array[int]":
        """Token ids of a text, int32; special tokens written out in it are recognised.

        Args:
            text: any text; lone surrogates become question marks.
            add_special_tokens: put the tokens around it that the tokenizer adds to a text (BOS); False for a rendered
                chat, whose template writes them itself.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> "list[array[int]]":
        """Token ids of several texts. Releases the interpreter lock while it works."""
        clean = [text.encode("utf-8", "replace").decode() if not text.isascii() else text for text in texts]
        encodings = self.raw.encode_batch_fast(clean, add_special_tokens=add_special_tokens)
        return [array("i", encoding.ids) for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all ids at once, by the tokenizer's own rules; unknown ids give nothing."""
        return str(self.raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, *, skip_special_tokens: bool = True, at_start: bool = True) -> Detokenizer:
        """An incremental decoder.

        Args:
            skip_special_tokens: leave special tokens out.
            at_start: the text starts here; False where it goes on from a prompt.
        """
        table = self._text_bytes if skip_special_tokens else self._all_bytes
        if table is None:
            return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))
        return ByteDetokenizer(table, at_start=at_start)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special tokens included."""
        if self._all_bytes is not None:
            return self._all_bytes[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """One token as text, with U+FFFD where it is not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it."""
        found = self.raw.token_to_id(token)
        return None if found is None else int(found)

    def special_id_of(self, token: str) -> int | None:
        """The id of a special token; None if there is no such token, or it is an ordinary one."""
        token_id = self.id_of(token)
        return token_id if token_id in self.special_token_ids else None

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The token sequences of `bad_words`, each word as the start of a text and after a space."""
        words = [word.lstrip() for word in params.bad_words if word.strip()]
        spellings = [spelling for word in words for spelling in (word, " " + word)]
        if not spellings:
            return ()
        encoded = self.encode_batch(spellings, add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """A chat as the text that the model expects, special tokens written out. Imports transformers.

        Args:
            messages: each with `role` and `content` (and whatever else the template knows).
            tools: JSON descriptions of functions.
            chat_template: a template to use instead of the model's.
            add_generation_prompt: end with the start of an assistant's message.
            continue_final_message: leave the last message open, for the model to go on with.
            template_kwargs: further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: the model has no template, or the template refuses these messages.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template = chat_template or self._template_for(bool(tools))
        arguments: dict[str, Any] = {
            **self._special_token_texts(),
            **(template_kwargs or {}),
            "conversations": [[dict(message) for message in messages]],
            "tools": [dict(tool) for tool in tools] if tools else None,
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        try:
            rendered: Any = render_jinja_template(**arguments)
        except Exception as error:  # templates raise whatever they like
            raise RequestError(f"the chat template refuses this chat: {error}", param="messages") from None
        return str(rendered[0][0])

    def render(self, chat: ChatPrompt) -> str:
        """A chat as text, by the model's own template, whether it knows tools or not.

        Raises:
            RequestError: as `render_chat`, or a message of a role that the template leaves out.
        """
        template = self.template_text(with_tools=bool(chat.tools))
        messages, tools = for_template(chat.messages, chat.tools or (), knows_tools=knows_tools(template))
        render = partial(
            self.render_chat,
            tools=tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            template_kwargs=chat.template_kwargs,
        )
        check_roles(messages, render)
        return render(messages)

    def template_text(self, *, with_tools: bool) -> str:
        """The chat template; empty if the model has none."""
        template = self.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use" if with_tools else "default") or template.get("default", "")
        return template

    def _template_for(self, with_tools: bool) -> str:
        template = self.template_text(with_tools=with_tools)
        if not template:
            raise RequestError(
                "this model has no chat template; use completions, or start the engine with --chat-template FILE",
                code="no_chat_template",
                param="messages",
            )
        return template

    def _special_token_texts(self) -> dict[str, str]:
        names = [name for name in self._settings if name.endswith("_token")]
        return {name: text for name in names if (text := _token_text(self._settings[name]))}

    def _end_token_ids(self, files: Mapping[str, dict[str, Any]]) -> tuple[int, ...]:
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = files.get(name, {}).get("eos_token_id")
            entries = value if isinstance(value, list) else [value]
            ids.update(entry for entry in entries if type(entry) is int and 0 <= entry <= INT32_MAX)  # -1 says "none"
        own = self.id_of(_token_text(self._settings.get("eos_token")))
        return tuple(sorted(ids if own is None else ids | {own}))

    def _byte_tables(self) -> tuple[ByteTable | None, ByteTable | None]:
        rules = _decoder_rules(json.loads(self.raw.to_str())["decoder"]) if self.raw.decoder is not None else None
        if rules is None:
            return None, None

        def with_special(token_id: int) -> bytes:
            token = self.raw.id_to_token(token_id) if 0 <= token_id < 2**31 else None
            return b"" if token is None else rules.token_bytes(token)

        def without_special(token_id: int) -> bytes:
            return b"" if token_id in self.special_token_ids else with_special(token_id)

        def table(look_up: Callable[[int], bytes]) -> ByteTable:
            return ByteTable(look_up, byte_fallback=rules.byte_fallback, stripped_spaces=rules.stripped_spaces)

        return table(with_special), table(without_special)


class _DecoderRules:
    """How a tokenizer.json decoder turns tokens into bytes: the two families that nearly all models belong to.

    `ByteLevel` (GPT-2's mapping of bytes to printable characters), and SentencePiece's sequence of Replace,
    ByteFallback, Fuse and Strip.
    """

    def __init__(self) -> None:
        self.byte_level = False
        self.byte_fallback = False
        self.stripped_spaces = 0
        self.replacements: list[tuple[str, str]] = []

    def add(self, step: Mapping[str, Any]) -> bool:
        """Take one step of the decoder; False if it is none of the known ones."""
        match step["type"]:
            case "ByteLevel":
                self.byte_level = True
            case "ByteFallback":
                self.byte_fallback = True
            case "Fuse":
                pass
            case "Replace" if "String" in step["pattern"]:
                self.replacements.append((step["pattern"]["String"], step["content"]))
            case "Strip" if step["content"] == " " and step["stop"] == 0:
                self.stripped_spaces = step["start"]
            case _:
                return False
        return True

    def token_bytes(self, token: str) -> bytes:
        """The bytes of one token."""
        if self.byte_level:
            try:
                return token.translate(_LATIN_1_OF_CHARACTER).encode("latin-1")
            except UnicodeEncodeError:  # it holds a character that stands for no byte
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        byte_token = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes([int(byte_token[1], 16)]) if byte_token else token.encode()


def _decoder_rules(decoder: Mapping[str, Any]) -> _DecoderRules | None:
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    rules = _DecoderRules()
    if not all(rules.add(step) for step in steps):
        return None
    order = [step["type"] for step in steps if step["type"] != "Replace"]
    known = (["ByteLevel"], ["ByteFallback"], ["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"])
    return rules if order in known else None


def _latin_1_of_character() -> dict[int, int]:
    """GPT-2's mapping: printable Latin-1 characters stand for themselves, the other bytes for 256 and following.

    As a table for `str.translate` that gives each byte as the character of that number; the characters below 256 that
    stand for no byte become one that Latin-1 lacks.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    none = dict.fromkeys(others, sys.maxunicode)
    return none | {value: value for value in printable} | {256 + n: value for n, value in enumerate(others)}


_LATIN_1_OF_CHARACTER = _latin_1_of_character()


def _token_text(value: Any) -> str:
    if isinstance(value, dict):  # a serialised AddedToken
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _load_raw(folder: Path) -> RawTokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        return _convert(folder)
    try:
        raw = RawTokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"cannot read the tokenizer {file}: {error}") from None
    raw.no_padding()
    raw.no_truncation()
    return raw


def _convert(folder: Path) -> RawTokenizer:
    """A tokenizer in another form than tokenizer.json, converted by transformers."""
    if not any((folder / name).exists() for name in OTHER_FORMS):
        raise ConfigError(f"no tokenizer in {folder}: wanted tokenizer.json, or one of {', '.join(OTHER_FORMS)}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), use_fast=True)
        return RawTokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # whatever a foreign folder provokes
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"cannot convert the tokenizer in {folder}, which has no tokenizer.json: {reason}") from None


def _chat_template(folder: Path, settings: Mapping[str, Any], file: str) -> str | dict[str, str]:
    if file:
        return read_text(Path(file), f"--chat-template {file}")
    beside = folder / "chat_template.jinja"
    if os.path.lexists(beside):
        return read_text(beside)
    beside = folder / "chat_template.json"
    own = read_object(beside, missing_ok=True).get("chat_template") or settings.get("chat_template") or ""
    if isinstance(own, list):
        return {entry["name"]: entry["template"] for entry in own}
    return own if isinstance(own, str | dict) else ""


def _sampling_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings[key] for key, name in GENERATION_DEFAULTS.items() if settings.get(key) is not None}
