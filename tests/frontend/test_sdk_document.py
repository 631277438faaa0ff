"""The examples of docs/sdk.md run as they stand, against the real frontend."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "sdk.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", [block for block in BLOCKS if "LLM" not in block], ids=["Client", "AsyncClient"])
def test_an_example_runs(frontend, block, capsys):
    assert "tcp://127.0.0.1:5555" in block
    exec(compile(block.replace("tcp://127.0.0.1:5555", frontend.endpoint), str(DOCUMENT), "exec"), {})
    assert "sea" in capsys.readouterr().out
