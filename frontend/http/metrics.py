"""Prometheus figures under the names that dashboards for such engines know, with the prefix `trireme:`.

Gauges and counters are read from the scheduler's last figures when someone asks; the histograms are fed by the core's
observer once for each request that ends. One registry, in this process; the scheduler's figures come with its messages.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.messages import STEP_PARTS
from frontend.engine import Engine
from frontend.request import Request

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)

GAUGES = {
    "num_requests_running": ("running_count", "Requests that run"),
    "num_requests_waiting": ("waiting_count", "Requests that wait"),
    "num_requests_swapped": ("swapped_count", "Requests whose KV is in host memory"),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of all requests"),
    "generation_tokens": ("output_tokens", "Tokens generated"),
    "num_preemptions": ("preemptions", "Requests preempted"),
    "prefix_cache_queries": ("prefix_query_tokens", "Tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_hit_tokens", "Tokens found in the prefix cache"),
    "prefix_cache_evictions": ("evictions", "Cached blocks given up"),
    "engine_steps": ("steps", "Steps run"),
}


disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside every figure, which no dashboard reads


class Metrics:
    """The figures of one frontend.

    Args:
        engine: whose figures.
        prefix: before every name.
    """

    def __init__(self, engine: Engine, prefix: str = "trireme:") -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_SchedulerFigures(engine, prefix))
        self._model = engine.model_names[0]
        self._finished = Counter(
            prefix + "request_success", "Requests that ended, by reason", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self._ttft = self._histogram(prefix + "time_to_first_token_seconds", "Arrival to first token")
        self._per_token = self._histogram(
            prefix + "request_time_per_output_token_seconds",
            "Mean time between a request's tokens",
            PER_TOKEN_BUCKETS_S,
        )
        self._latency = self._histogram(prefix + "e2e_request_latency_seconds", "Arrival to end")
        self._decode = self._histogram(prefix + "request_decode_time_seconds", "First token to last")
        engine.core.observers.append(self.observe)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
        family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
        return family.labels(self._model)

    def observe(self, request: Request, outcome: str) -> None:
        """Take the times of a request that has ended."""
        self._finished.labels(self._model, outcome).inc()
        times = request.timings
        if times.finished_s is not None:
            self._latency.observe(times.finished_s - times.arrived_s)
        if times.first_token_s is None or times.last_token_s is None:
            return
        self._ttft.observe(times.first_token_s - times.arrived_s)
        decode_s = times.last_token_s - times.first_token_s
        self._decode.observe(decode_s)
        longest = max(len(sample.token_ids) for sample in request.samples)
        if longest > 1:
            self._per_token.observe(decode_s / (longest - 1))

    def render(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)


class _SchedulerFigures(Collector):
    def __init__(self, engine: Engine, prefix: str) -> None:
        self._engine = engine
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """The scheduler's last figures as metric families."""
        stats = self._engine.stats
        for name, (attribute, text) in GAUGES.items():
            yield self._family(GaugeMetricFamily, name, text, getattr(stats, attribute))
        used_count = stats.total_block_count - stats.free_block_count - stats.cached_block_count
        usage = used_count / max(1, stats.total_block_count)
        yield self._family(GaugeMetricFamily, "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", usage)
        for name, (attribute, text) in COUNTERS.items():
            yield self._family(CounterMetricFamily, name, text, getattr(stats, attribute))
        restarts = self._engine.health().restarts
        yield self._family(CounterMetricFamily, "engine_restarts", "Lost processes started again", restarts)
        yield self._step_times()

    def _step_times(self) -> CounterMetricFamily:
        text = "Time that the steps took so far, by part"
        family = CounterMetricFamily(self._prefix + "step_time_seconds", text, labels=["model_name", "part"])
        for part, total_us in zip(STEP_PARTS, self._engine.core.step_totals_us().values(), strict=True):
            family.add_metric([self._engine.model_names[0], part], total_us / 1e6)
        return family

    def _family(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(self._prefix + name, text, labels=["model_name"])
        family.add_metric([self._engine.model_names[0]], value)
        return family
