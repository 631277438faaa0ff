"""Prometheus metrics under the names that vLLM's dashboards know; docs/observing.md lists them.

All are read when someone asks: gauges and counters from the scheduler's last figures, histograms from what the core
counted. One registry, in this process; the scheduler's figures come with its messages.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.messages import STEP_PARTS
from common.version import own_version
from frontend.engine import Engine
from frontend.figures import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGES = {
    "num_requests_running": ("running_count", "Sequences that run"),
    "num_requests_waiting": ("waiting_count", "Sequences that wait"),
    "num_requests_swapped": ("swapped_count", "Preempted sequences whose KV is in host memory"),
    "num_step_sizes_unprepared": ("unprepared_count", "Sizes of steps that have yet to be prepared, in pauses"),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that have started to run"),
    "generation_tokens": ("output_tokens", "Tokens generated"),
    "num_preemptions": ("preemptions", "Sequences preempted"),
    "prefix_cache_queries": ("prefix_query_tokens", "Tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_hit_tokens", "Tokens found in the prefix cache"),
    "prefix_cache_evictions": ("evictions", "Cached blocks given up"),
    "engine_steps": ("steps", "Steps run"),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("first_token_s", "Arrival to first token"),
    "inter_token_latency_seconds": ("gap_s", "Time between two tokens of a sample"),
    "time_per_output_token_seconds": ("gap_s", "The same as inter_token_latency_seconds, under its older name"),
    "request_time_per_output_token_seconds": ("mean_gap_s", "Mean time between a request's tokens"),
    "e2e_request_latency_seconds": ("latency_s", "Arrival to end"),
    "request_queue_time_seconds": ("queue_s", "Submission to the first step that computes some of the prompt"),
    "request_prefill_time_seconds": ("prefill_s", "That step to the first token"),
    "request_decode_time_seconds": ("decode_s", "First token to last"),
    "request_inference_time_seconds": ("inference_s", "Prefill and decode together"),
    "request_prompt_tokens": ("prompt_tokens", "Prompt tokens of a request"),
    "request_generation_tokens": ("output_tokens", "Tokens generated for a request"),
    "request_params_max_tokens": ("max_tokens", "What requests allow as max_tokens"),
    "request_params_n": ("sample_counts", "Samples that requests ask for"),
}


class Metrics(Collector):
    """The metrics of one frontend.

    Args:
        engine: whose figures.
        prefix: of every name.
    """

    def __init__(self, engine: Engine, prefix: str = "trireme:") -> None:
        self._engine = engine
        self._prefix = prefix
        self._model = engine.model_names[0]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All figures as metric families."""
        stats, figures = self._engine.stats, self._engine.core.figures
        for name, (attribute, text) in GAUGES.items():
            yield self._family(GaugeMetricFamily, name, text, getattr(stats, attribute))
        used_count = stats.total_block_count - stats.free_block_count - stats.cached_block_count
        usage = used_count / max(1, stats.total_block_count)
        yield self._family(GaugeMetricFamily, "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", usage)
        for name, (attribute, text) in COUNTERS.items():
            yield self._family(CounterMetricFamily, name, text, getattr(stats, attribute))
        restarts = self._engine.health().restarts
        yield self._family(CounterMetricFamily, "engine_restarts", "Lost processes started again", restarts)
        yield from self._by_label()
        for name, (attribute, text) in HISTOGRAMS.items():
            yield self._histogram(name, text, getattr(figures, attribute))
        yield self._step_sizes()
        yield self._info()

    def _by_label(self) -> Iterator[Metric]:
        """The counters that have a label of their own."""
        figures = self._engine.core.figures
        text = "Requests that ended, by reason"
        ended = CounterMetricFamily(self._prefix + "request_success", text, labels=["model_name", "finished_reason"])
        for outcome, count in figures.ended.items():
            ended.add_metric([self._model, outcome], count)
        yield ended
        text = "Time that the steps took so far, by part"
        parts = CounterMetricFamily(self._prefix + "step_time_seconds", text, labels=["model_name", "part"])
        for part, total_us in zip(STEP_PARTS, figures.step_totals_us().values(), strict=True):
            parts.add_metric([self._model, part], total_us / 1e6)
        yield parts

    def _histogram(self, name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
        buckets = [(str(float(bound)), float(count)) for bound, count in histogram.cumulated()]
        return self._buckets(name, text, [*buckets, ("+Inf", float(histogram.count))], histogram.total)

    def _step_sizes(self) -> HistogramMetricFamily:
        """Tokens per step, whose bounds are the powers of two."""
        stats, buckets, so_far = self._engine.stats, [], 0
        for power, count in enumerate(self._engine.core.figures.step_sizes):
            so_far += count
            buckets.append((str(float(1 << power)), float(so_far)))
        total = stats.decode_tokens + stats.chunk_tokens
        return self._buckets("iteration_tokens_total", "Tokens of a step", [*buckets, ("+Inf", float(so_far))], total)

    def _buckets(self, name: str, text: str, buckets: list[tuple[str, float]], total: float) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self._prefix + name, text, labels=["model_name"])
        family.add_metric([self._model], buckets, sum_value=total)
        return family

    def _info(self) -> GaugeMetricFamily:
        """What does not change while the engine runs, as labels."""
        limits, config = self._engine.limits, self._engine.config
        labels = {
            "model_name": self._model,
            "version": own_version(),
            "max_model_len": str(limits.max_model_len if limits else 0),
            "max_num_seqs": str(limits.max_num_seqs if limits else 0),
            "block_size": str(limits.block_size if limits else config.cache.block_size),
            "num_gpu_blocks": str(limits.block_count if limits else 0),
            "cache_dtype": config.cache.kv_cache_dtype,
        }
        family = GaugeMetricFamily(self._prefix + "cache_config_info", "The engine's settings", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _family(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(self._prefix + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
