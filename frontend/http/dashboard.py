"""`/dashboard`: one page that shows the engine live, and `/dashboard/data`, which feeds it.

The page is a single file that loads nothing from elsewhere; its policy lets it run only its own script, by hash, and
talk only to this server. It contains no figures itself, so it needs no API key; the data do, and the page asks for it.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from frontend.http.errors import JsonResponse
from frontend.http.history import History

_FILE = Path(__file__).with_name("dashboard.html")


async def data(request: Request) -> Response:
    """What the dashboard shows that is new since the row that it names."""
    history: History = request.app.state.history
    number = request.query_params.get("row_number", "0")
    if not re.fullmatch(r"\d{1,12}", number):
        raise RequestError(f"row_number: wanted a number from 0, got {number!r:.40}", param="row_number")
    view = history.view(request.query_params.get("run", ""), int(number))
    return JsonResponse(view, headers={"cache-control": "no-store"})


async def page(_: Request) -> Response:
    """The engine live: throughput, latencies, queue, cache, and the parts of a step."""
    text, policy = page_and_policy()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(text, media_type="text/html", headers=headers)


@cache
def page_and_policy() -> tuple[str, str]:
    """The page's text, and the Content-Security-Policy that lets only its own style and script in."""
    text = _FILE.read_text(encoding="utf-8")
    sources = {kind: _hash_of(kind, text) for kind in ("style", "script")}
    allowed = "; ".join(f"{kind}-src {source}" for kind, source in sources.items())
    policy = f"default-src 'none'; {allowed}; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    return text, policy + "; frame-ancestors 'self'"


def _hash_of(kind: str, text: str) -> str:
    [content] = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
