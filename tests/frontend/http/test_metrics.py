"""`/metrics`: every documented name is there, nothing undocumented is, and the figures move as they should."""

import re
from array import array
from pathlib import Path

from common.messages import EngineStats

DOCUMENT = Path(__file__).parents[3] / "docs" / "observing.md"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


def documented() -> dict[str, str]:
    """Name to kind, from the document's table."""
    rows = re.findall(r"^\| (`[^|]+) \| (gauge|counter|histogram) \|", DOCUMENT.read_text(), re.MULTILINE)
    named = [(name, kind) for names, kind in rows for name in re.findall(r"`([a-z0-9_]+)`", names)]
    assert len(dict(named)) == len(named), "a name stands in the table twice"
    return dict(named)


def scraped(api, prefix: str = "trireme:") -> tuple[dict[str, str], dict[str, float]]:
    """Kinds by name without the prefix, and values by name with labels other than the model's and bounds'."""
    kinds, values = {}, {}
    for line in api.get("/metrics").text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            kinds[name.removeprefix(prefix)] = kind
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            plain = re.sub(r',?model_name="[^"]*"|[{}]', " ", name).replace(" ,", " ")
            values[" ".join(plain.split()).removeprefix(prefix)] = float(value)
    return kinds, values


def test_what_is_exported_is_what_is_documented(api):
    kinds, _ = scraped(api)
    assert kinds == documented()


def test_nothing_has_happened_yet(api):
    kinds, values = scraped(api)
    for name, kind in kinds.items():
        if kind == "histogram":
            assert values[name + "_count"] == values[name + "_sum"] == 0


def test_a_request_moves_what_it_should(api):
    before = scraped(api)[1]
    assert api.post("/v1/chat/completions", CHAT).status_code == 200
    after = scraped(api)[1]
    moved = {name for name in after if after[name] != before.get(name) and "_bucket" not in name}
    tokens = after["request_prompt_tokens_sum"]
    expected = {
        "time_to_first_token_seconds_count": 1, "inter_token_latency_seconds_count": 4,
        "time_per_output_token_seconds_count": 4, "request_time_per_output_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1, "request_decode_time_seconds_count": 1,
        "request_prompt_tokens_count": 1, "request_generation_tokens_sum": 5, "request_params_max_tokens_sum": 5,
        "request_params_n_sum": 1,
    }  # fmt: skip
    assert {name: after[name] for name in expected} == expected and tokens > 5
    assert set(expected) <= moved
    assert next(value for name, value in after.items() if 'finished_reason="length"' in name) == 1


def test_the_schedulers_figures(api):
    first = EngineStats(
        running_count=3, waiting_count=2, swapped_count=1, total_block_count=10, free_block_count=4,
        cached_block_count=1, prompt_tokens=90, output_tokens=7, preemptions=5, prefix_query_tokens=80,
        prefix_hit_tokens=40, evictions=6, steps=2, decode_tokens=4, chunk_tokens=96, unprepared_count=131,
        parts_us=array("i", [10, 20, 30, 400_000, 50, 60]), step_sizes=array("i", [0, 0, 1, 0, 0, 0, 0, 1]),
    )  # fmt: skip
    api.engine.core.handle(first)
    values = scraped(api)[1]
    expected = {
        "num_requests_running": 3, "num_requests_waiting": 2, "num_requests_swapped": 1, "kv_cache_usage_perc": 0.5,
        "prompt_tokens_total": 90, "generation_tokens_total": 7, "num_preemptions_total": 5,
        "prefix_cache_queries_total": 80, "prefix_cache_hits_total": 40, "prefix_cache_evictions_total": 6,
        "engine_steps_total": 2, "iteration_tokens_total_count": 2, "iteration_tokens_total_sum": 100,
        "num_step_sizes_unprepared": 131,
        'step_time_seconds_total part="forward"': 0.8,
    }  # fmt: skip
    assert {name: values.get(name) for name in expected} == expected
    assert values['iteration_tokens_total_bucket le="4.0"'] == 1
    assert values['iteration_tokens_total_bucket le="64.0"'] == 1
    assert values['iteration_tokens_total_bucket le="128.0"'] == 2


def test_another_prefix(make_api):
    api = make_api(metrics_prefix="vllm:").ready()
    kinds, _ = scraped(api, "vllm:")
    assert kinds == documented()
    assert "trireme" not in api.get("/metrics").text
    assert "_created" not in api.get("/metrics").text
