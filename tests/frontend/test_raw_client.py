"""The example client that knows docs/protocol.md alone, against the real frontend."""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest

from common import client_messages as wire
from common import messages
from common.errors import RequestError
from frontend.client_server import prompt_of
from frontend.text_messages import ForTextProcess, FromTextProcess

ROOT = Path(__file__).parents[2]


def test_the_example_without_the_sdk(frontend, capsys):
    example = runpy.run_path(str(ROOT / "examples" / "raw_client.py"))
    assert example["main"](frontend.endpoint, "hello") == 0
    shown = capsys.readouterr()
    assert shown.out == "user\nhello"  # the echo of the rendered chat, up to its first end token
    assert f"protocol version {wire.CLIENT_PROTOCOL_VERSION}" in shown.err
    assert "stop: " in shown.err


def test_the_example_says_that_its_hello_was_refused(frontend, capsys, monkeypatch):
    monkeypatch.setattr(wire, "OLDEST_CLIENT_PROTOCOL_VERSION", wire.CLIENT_PROTOCOL_VERSION + 1)
    example = runpy.run_path(str(ROOT / "examples" / "raw_client.py"))
    assert example["main"](frontend.endpoint, "hello") == 1
    assert "refused: " in capsys.readouterr().err


def test_the_example_says_what_it_wants(monkeypatch):
    monkeypatch.setattr("sys.argv", ["raw_client.py"])
    with pytest.raises(SystemExit, match=r"^usage: .*raw_client\.py ENDPOINT QUESTION$"):
        runpy.run_path(str(ROOT / "examples" / "raw_client.py"), run_name="__main__")


def test_the_document_offers_the_chat_options_that_there_are():
    text = (ROOT / "docs" / "protocol.md").read_text()
    [row] = re.findall(r"^\| chat \| map \| for chats, each may be missing: (.*) \|$", text, re.MULTILINE)
    with pytest.raises(RequestError) as caught:
        prompt_of([{"role": "user", "content": "x"}], {"no_such_option": 1})
    assert re.findall(r"`(\w+)`", row) == str(caught.value).partition("known are ")[2].split(", ")


def test_the_document_names_every_message_of_the_internal_links():
    internal = (ROOT / "docs" / "protocol.md").read_text().partition("# The internal links")[2]
    kinds = {kind for kind in vars(messages).values() if isinstance(kind, type) and hasattr(kind, "CODE")}
    kinds |= {*ForTextProcess.__args__, *FromTextProcess.__args__}
    assert len(kinds) > 20
    assert [f"{kind.CODE} {kind.__name__}" for kind in kinds if f"{kind.CODE} {kind.__name__}" not in internal] == []


def test_the_document_names_every_message_and_field():
    text = (ROOT / "docs" / "protocol.md").read_text()
    kinds = [*wire.FromClient.__args__, *wire.ToClient.__args__]
    for kind in kinds:
        assert f"{kind.CODE} {kind.__name__}" in text
        for name in [field.name for field in dataclasses.fields(kind)]:
            assert f"| {name} |" in text or name in ("entries", "text"), (
                f"docs/protocol.md lacks {kind.__name__}.{name}"
            )
