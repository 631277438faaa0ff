"""The dashboard in a real browser, on a real engine: it runs, shows figures, and breaks none of its own rules.

Needs Debian's `chromium` or another one on the path; skipped where there is none.
"""

import re
import shutil
import subprocess
import time

import httpx
import pytest

from tests.support.patient_http import get

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser on the path: none of {', '.join(BROWSERS)}")


@pytest.fixture
def look(server, tmp_path):
    """Opens the page and gives its document after some seconds of the browser's own time, and what it complained of."""

    def look() -> tuple[str, list[str]]:
        run = subprocess.run(
            [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1440,820", "--virtual-time-budget=5000",
             "--enable-logging=stderr", "--dump-dom", server.ready["http"] + "/dashboard"],
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-2000:]
        return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line or "Uncaught" in line]

    return look


def wait_for_a_row_with_tokens(url: str) -> None:
    """The history gains a row a second."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        view = get(url + "/dashboard/data").json()
        at = view["fields"].index("output_tps")
        if any(row[at] for row in view["rows"]):
            return
    raise AssertionError("the tokens are in no row of the history")


def shown(page: str, name: str) -> str:
    """What a tile shows, without markup."""
    [value] = re.findall(rf'<div class="name">{name}</div><div class="value">(.*?)</div>', page)
    return re.sub(r"<[^>]+>", " ", value)


def test_the_page_draws_what_the_engine_did(server, look):
    url = server.ready["http"]
    body = {"prompt": "The sea, the sea", "max_tokens": 60, "ignore_eos": True}
    for _ in range(3):
        assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 200
    wait_for_a_row_with_tokens(url)
    document, complaints = look()
    assert complaints == []
    page = re.sub(r"<script>.*?</script>", "", document, flags=re.DOTALL)
    assert 'class="pill serving"' in page
    assert page.count('<article class="card chart">') == 8
    assert page.count('<path d="M') >= 8, "no lines are drawn"
    assert re.search(r"\d", shown(page, "Output")) and re.search(r"\d", shown(page, "KV cache in use"))
    assert "NaN" not in page and "undefined" not in page and "Infinity" not in page
