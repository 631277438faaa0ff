"""The dashboard's data against what the core was told, and what guards the page."""

import asyncio
import base64
import hashlib
import re
from array import array

import pytest

from common.messages import EngineStats
from frontend.figures import FAILURES
from frontend.http.dashboard import page_and_policy
from frontend.http.history import FIELDS, KEPT_ROWS, History

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def timed(api):
    """A history whose seconds the test makes pass, and its newest row by name."""
    clock = Clock()
    history = History(api.engine, clock, lambda: 1_000_000 + clock.now_s)

    def second(seconds: float = 1.0) -> dict[str, float | None]:
        clock.now_s += seconds
        history.add_row()
        return dict(zip(FIELDS, viewed(history)["rows"][-1], strict=True))

    return history, second


def viewed(history: History, run: str = "", row_number: int = 0):
    """What a page gets."""

    async def inside() -> dict:
        return history.view(run, row_number)

    return asyncio.run(inside())


def test_a_second_without_requests_is_zeros_and_nothing_else(timed):
    _, second = timed
    row = second()
    assert row["time_s"] == 1_000_051.0
    nothing = {name for name, value in row.items() if value is None}
    assert nothing == {name for name in FIELDS if re.match(r"ttft|itl|hit_rate|decode_rows|chunk_tokens|.*_us$", name)}
    assert {row[name] for name in FIELDS if name not in nothing | {"time_s"}} == {0}


def test_a_row_holds_what_happened_in_its_second(api, timed):
    _, second = timed
    assert api.post("/v1/chat/completions", CHAT).status_code == 200
    api.engine.core.handle(
        EngineStats(
            running_count=2, waiting_count=1, total_block_count=100, free_block_count=50, cached_block_count=20,
            steps=4, decode_tokens=8, chunk_tokens=60, prefix_query_tokens=100, prefix_hit_tokens=25, preemptions=3,
            parts_us=array("i", [10, 20, 30, 4000, 50, 60]), step_sizes=array("i", [0, 1, 3]),
        )
    )  # fmt: skip
    row = second(2.0)
    expected = {
        "running": 2, "waiting": 1, "swapped": 0, "kv_used": 0.3, "kv_cached": 0.2, "output_tps": 2.5,
        "prefill_tps": 30, "finished_ps": 0.5, "failed_ps": 0, "preemptions": 3, "hit_rate": 0.25, "steps_ps": 2,
        "decode_rows": 2, "chunk_tokens": 15, "plan_us": 10, "forward_us": 4000, "report_us": 60,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert 0 <= row["itl_p50"] <= row["itl_p90"] <= row["itl_p99"] and row["ttft_p50"] > 0
    after = second()
    assert after["output_tps"] == after["steps_ps"] == after["preemptions"] == 0 and after["itl_p50"] is None
    assert after["ttft_p50"] == row["ttft_p50"] and after["hit_rate"] == 0.25, "ten seconds count, not one"
    assert after["running"] == 2
    for _ in range(10):
        after = second()
    assert after["ttft_p50"] is None and after["hit_rate"] is None


@pytest.mark.parametrize("code", ["queue_full", "deadline_exceeded", "key_revoked", "internal_error", "sample_failed"])
def test_a_full_queue_is_a_refusal_and_no_failure(api, timed, code):
    _, second = timed
    api.engine.core.figures.ended[code] += 1
    row, is_failure = second(2.0), code in FAILURES
    assert (row["refused_ps"], row["failed_ps"]) == ((0, 0.5) if is_failure else (0.5, 0))


def test_a_scheduler_that_starts_anew_makes_no_negative_rates(api, timed):
    _, second = timed
    api.engine.core.handle(EngineStats(steps=100, chunk_tokens=1000, prefix_query_tokens=10))
    second()
    api.engine.core.suspend("the worker was lost", 1)
    api.engine.core.handle(EngineStats(steps=5, chunk_tokens=40))
    row = second()
    assert (row["steps_ps"], row["prefill_tps"]) == (5, 40)
    assert all(value is None or value >= 0 for value in row.values())


def test_a_page_gets_each_row_once_and_all_of_them_after_a_restart(timed):
    history, second = timed
    for _ in range(3):
        second()
    view = viewed(history)
    assert (len(view["rows"]), view["row_number"]) == (3, 3)
    assert viewed(history, view["run"], 3)["rows"] == []
    second()
    assert len(viewed(history, view["run"], 3)["rows"]) == 1
    assert len(viewed(history, "another run", 3)["rows"]) == 4
    assert viewed(history, view["run"], 99)["rows"] == []


def test_only_the_last_minutes_are_kept(timed):
    history, second = timed
    for _ in range(KEPT_ROWS + 7):
        second()
    view = viewed(history)
    assert (len(view["rows"]), view["row_number"]) == (KEPT_ROWS, KEPT_ROWS + 7)
    assert len(viewed(history, view["run"], 2)["rows"]) == KEPT_ROWS


def test_the_data_over_http(api):
    reply = api.get("/dashboard/data").json()
    assert reply["state"] == "serving" and reply["model"] == "tiny" and reply["rows"] == []
    assert reply["limits"]["max_model_len"] == 512 and reply["task_count"] >= 1
    assert reply["fields"] == list(FIELDS)
    assert api.get("/dashboard/data?row_number=-1").status_code == 400


def test_the_page_runs_only_its_own_script(api):
    response = api.get("/dashboard")
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for kind in ("style", "script"):
        [content] = re.findall(rf"<{kind}>(.*?)</{kind}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_the_page_loads_nothing_from_elsewhere():
    text, _ = page_and_policy()
    addresses = set(re.findall(r"https?://[^'\"\s)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name space, which nobody fetches"
    assert not re.search(r"\b(src|href)=\"(?!data:)", text)
    assert not re.search(r"\sstyle=", text), "the policy would ignore it"
    assert "innerHTML" not in text


def test_with_an_api_key_the_page_is_open_and_the_figures_are_not(make_api):
    api = make_api(api_key=("secret",)).ready()
    assert api.get("/dashboard").status_code == 200
    assert api.get("/dashboard/data").status_code == 401
    assert api.get("/dashboard/data", headers={"authorization": "Bearer secret"}).status_code == 200
