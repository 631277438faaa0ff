"""The example client that knows docs/protocol.md alone, against the real frontend."""

import dataclasses
import runpy
from pathlib import Path

from common import client_messages as wire

ROOT = Path(__file__).parents[2]


def test_the_example_without_the_sdk(frontend, capsys):
    example = runpy.run_path(str(ROOT / "examples" / "raw_client.py"))
    assert example["main"](frontend.endpoint, "hello") == 0
    shown = capsys.readouterr()
    assert shown.out == "user\nhello"  # the echo of the rendered chat, up to its first end token
    assert "protocol version 1" in shown.err
    assert "stop: " in shown.err


def test_the_document_names_every_message_and_field():
    text = (ROOT / "docs" / "protocol.md").read_text()
    kinds = [*wire.FromClient.__args__, *wire.ToClient.__args__]
    for kind in kinds:
        assert f"{kind.CODE} {kind.__name__}" in text
        for name in [field.name for field in dataclasses.fields(kind)]:
            assert f"| {name} |" in text or name in ("entries", "text"), (
                f"docs/protocol.md lacks {kind.__name__}.{name}"
            )
