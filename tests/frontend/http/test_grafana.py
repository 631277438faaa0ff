"""Dashboard and alerts ask only for what `/metrics` exports, with labels that it has; panels fit together."""

import itertools
import json
import re
from pathlib import Path

import pytest
import yaml

from benchmarks.fake_scheduler import LIMITS
from common.errors import RequestError
from common.messages import EngineStats, RequestFailed
from frontend.figures import FAILURES

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = DOCS / "grafana" / "trireme.json"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


@pytest.fixture
def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text())


def queries(dashboard: dict) -> list[str]:
    """Every expression, with the query of the variable."""
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return found + [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]


def exported(api) -> dict[str, set[str]]:
    """Names of samples without the prefix, and the labels that they have."""
    api.engine.core.handle(EngineStats(steps=1, parts_us=[1] * 6, step_sizes=[1]))
    assert api.post("/v1/chat/completions", CHAT).status_code == 200
    found: dict[str, set[str]] = {}
    for line in api.get("/metrics").text.splitlines():
        if match := re.match(r"trireme:(\w+)\{(.*)\} ", line):
            found.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2]))
    return found


def test_every_metric_is_exported_with_the_labels_asked_for(api, dashboard):
    names = exported(api)
    asked = queries(dashboard)
    assert len(asked) > 30
    for query in asked:
        metrics = re.findall(r"\$\{prefix\}(\w+)", query)
        assert metrics, query
        for metric in metrics:
            assert metric in names, f"{metric} is not exported: {query}"
        labels = {*re.findall(r"(\w+)=~", query), *re.findall(r"by \((\w+)\)", query)}
        for label in labels:
            assert any(label in names[metric] for metric in metrics), f"no label {label}: {query}"
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def test_every_alert_asks_for_metrics_with_the_labels_that_they_have(api):
    names = exported(api)
    [group] = yaml.safe_load((DOCS / "prometheus" / "alerts.yml").read_text())["groups"]
    assert len(group["rules"]) > 5
    for rule in group["rules"]:
        metrics = re.findall(r"trireme:(\w+)", rule["expr"])
        assert set(metrics) <= set(names), rule["alert"]
        assert metrics or rule["expr"].startswith("up{")
        labels = {*re.findall(r"[{,](\w+)!?[=~]", rule["expr"]), *re.findall(r"by \(([\w, ]+)\)", rule["expr"])}
        asked = {label for listed in labels for label in listed.split(", ")} - {"instance", "job"}
        assert all(any(label in names[metric] for metric in metrics) for label in asked), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]


def reasons(alert: str) -> str:
    """Which ends of requests an alert counts, as a regular expression."""
    [group] = yaml.safe_load((DOCS / "prometheus" / "alerts.yml").read_text())["groups"]
    [expr] = [rule["expr"] for rule in group["rules"] if rule["alert"] == alert]
    [pattern] = re.findall(r'finished_reason=~"([^"]+)"', expr)
    return pattern


ENDS = {
    "abort": lambda core, key: core.abort(key),
    "engine_dead": lambda core, _: core.fail_all("scheduler was killed"),
    "shutting_down": lambda core, _: core.fail_all("bye", code="shutting_down", dead=False),
    "engine_restarted": lambda core, _: [core.suspend("killed", n) or core.handle(LIMITS) for n in (1, 2)],
    "queue_full": lambda core, key: core.handle(RequestFailed(key, "queue_full", "full", status=429)),
    "deadline_exceeded": lambda core, key: core.handle(RequestFailed(key, "deadline_exceeded", "late", status=408)),
    "invalid_parameter": lambda core, key: core.handle(RequestFailed(key, "invalid_parameter", "no such grammar")),
    "internal_error": lambda core, key: core.handle(RequestFailed(key, "internal_error", "unreadable", status=500)),
    "sample_failed": lambda core, key: core.fail(key, RequestError("NaN", code="sample_failed", status=500)),
    "key_revoked": lambda core, key: core.fail(key, RequestError("revoked", code="key_revoked", status=401)),
}


@pytest.mark.parametrize("end", ENDS)
def test_failures_are_what_the_engine_is_to_blame_for_and_refusals_are_load(end, memory_engine, submit):
    """Requests that found the queue full were counted as failures, like those whose client's key was revoked."""
    sink = submit("the sea")
    ENDS[end](memory_engine.core, sink.request.request_id)
    [outcome] = memory_engine.core.figures.ended
    failures = {"engine_dead", "engine_restarted", "internal_error", "sample_failed"}
    assert failures == FAILURES == set(reasons("TriremeFailures").split("|"))
    assert bool(re.fullmatch(reasons("TriremeFailures"), outcome)) == (outcome in failures)
    assert bool(re.fullmatch(reasons("TriremeRefusals"), outcome)) == (outcome in ("queue_full", "deadline_exceeded"))


@pytest.mark.parametrize("end", ENDS)
def test_a_refusal_is_no_short_request(end, memory_engine, submit):
    """A thousand refusals in a second were a thousand requests with a latency of nothing and no output."""
    ENDS[end](memory_engine.core, submit("the sea").request.request_id)
    figures = memory_engine.core.figures
    kept = (figures.latency_s, figures.prompt_tokens, figures.output_tokens, figures.max_tokens, figures.sample_counts)
    assert [histogram.count for histogram in kept] == [int(figures.ended["abort"])] * 5


def test_the_legends_name_labels_that_the_query_keeps(dashboard):
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"]


def test_panels_do_not_overlap(dashboard):
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for first, second in itertools.combinations([panel["gridPos"] for panel in dashboard["panels"]], 2):
        apart_x = first["x"] + first["w"] <= second["x"] or second["x"] + second["w"] <= first["x"]
        apart_y = first["y"] + first["h"] <= second["y"] or second["y"] + second["h"] <= first["y"]
        assert apart_x or apart_y, f"{first} and {second}"
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard["panels"])
