"""Prometheus metrics of a server, under vLLM's names where they exist, else under ``dsbd:``."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dsbd_ort.constraints.binding import kind_of
from dsbd_ort.decoding import DecodingStats
from dsbd_ort.engine import Service
from dsbd_ort.openai_server.protocol import FINISH_REASONS
from dsbd_ort.requests.results import GenerationResult, StreamPiece
from dsbd_ort.speech.transcript import Transcript

Clock = Callable[[], float]

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKENS = tuple(float(2**power) for power in range(17))
_COUNTERS: dict[str, tuple[str, ...]] = {  # name: help, labels
    "vllm:prompt_tokens": ("Prompt tokens.",),
    "vllm:generation_tokens": ("Tokens returned.",),
    "vllm:request_success": ("Sequences returned, by finish reason.", "finished_reason"),
    "vllm:spec_decode_num_drafts": ("Drafted forests.",),
    "vllm:spec_decode_num_draft_tokens": ("Drafted tokens, all branches counted.",),
    "vllm:spec_decode_num_accepted_tokens": ("Drafted tokens that were committed.",),
    "dsbd:drafted_tokens": ("Drafted tokens, by the request's drafter.", "drafter"),
    "dsbd:accepted_tokens": ("Drafted tokens that were committed, by drafter.", "drafter"),
    "dsbd:audio_seconds": ("Seconds of audio transcribed.",),
    "dsbd:requests_cancelled": ("Requests cancelled.",),
    "dsbd:constrained_tokens": ("Tokens returned under a constraint, by its kind.", "constraint"),
    "dsbd:constrained_iterations": ("Iterations under a constraint, by its kind.", "constraint"),
    "dsbd:http_answers": ("HTTP responses.", "path", "status"),
}
_HISTOGRAMS = {  # name: help, buckets
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", _LONG),
    "vllm:inter_token_latency_seconds": ("Between two pieces with new tokens.", _SHORT),
    "vllm:request_time_per_output_token_seconds": ("Per token after the first.", _SHORT),
    "vllm:e2e_request_latency_seconds": ("From arrival to the last token.", _LONG),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "vllm:request_generation_tokens": ("Tokens of a sequence.", _TOKENS),
}


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, service: Service, model_name: str, clock: Clock) -> None:
        self.registry = CollectorRegistry()
        self.clock = clock
        self.registry.register(_ServiceCollector(service, model_name))
        self._model = {"model_name": model_name}
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for name, (text, *labels) in _COUNTERS.items():
            counter = Counter(name, text, (*self._model, *labels), registry=self.registry)
            self._counters[name] = counter
            if not labels:
                self.count(name, 0)  # it is shown from the beginning
        for name, (text, buckets) in _HISTOGRAMS.items():
            labels = list(self._model)
            histogram = Histogram(name, text, labels, buckets=buckets, registry=self.registry)
            self._histograms[name] = histogram.labels(**self._model)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter of ``_COUNTERS``; each label must have few values."""
        self._counters[name].labels(**self._model, **labels).inc(amount)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def count_drafted(self, stats: DecodingStats) -> None:
        if stats.num_draft_tokens:
            self.count("vllm:spec_decode_num_drafts", stats.num_iterations)
            self.count("vllm:spec_decode_num_draft_tokens", stats.num_draft_tokens)
            self.count("vllm:spec_decode_num_accepted_tokens", stats.num_accepted_tokens)
            self.count("dsbd:drafted_tokens", stats.num_draft_tokens, drafter=stats.drafter)
            self.count("dsbd:accepted_tokens", stats.num_accepted_tokens, drafter=stats.drafter)

    def count_transcript(self, transcript: Transcript, seconds: float) -> None:
        """Count a transcribed audio; ``seconds`` since its request arrived."""
        stats = transcript.stats
        self.count("dsbd:audio_seconds", transcript.duration)
        self.observe("vllm:e2e_request_latency_seconds", seconds)
        self.count("vllm:prompt_tokens", stats.num_prompt_tokens)
        self.count("vllm:generation_tokens", stats.num_output_tokens)
        self.count_drafted(stats)


class RequestMeter:
    """Measures one HTTP request from its arrival on."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = metrics.clock()
        self._last_token_by_index: dict[int, float] = {}

    def piece(self, index: int, piece: StreamPiece) -> None:
        if not piece.token_ids:
            return
        now = self._metrics.clock()
        if (last := self._last_token_by_index.get(index)) is not None:
            self._metrics.observe("vllm:inter_token_latency_seconds", now - last)
        else:
            self._metrics.observe("vllm:time_to_first_token_seconds", now - self._arrived)
        self._last_token_by_index[index] = now

    def result(self, result: GenerationResult, constraint: Any = None) -> None:
        metrics, stats = self._metrics, result.stats
        metrics.observe("vllm:e2e_request_latency_seconds", metrics.clock() - self._arrived)
        metrics.count("vllm:prompt_tokens", stats.num_prompt_tokens)
        metrics.observe("vllm:request_prompt_tokens", stats.num_prompt_tokens)
        if (seconds := stats.time_per_output_token_s) is not None:
            metrics.observe("vllm:request_time_per_output_token_seconds", seconds)
        metrics.count_drafted(stats)
        num_tokens = [len(sequence.token_ids) for sequence in result.sequences]
        metrics.count("vllm:generation_tokens", sum(num_tokens))
        for number, sequence in zip(num_tokens, result.sequences, strict=True):
            metrics.observe("vllm:request_generation_tokens", number)
            reason = FINISH_REASONS[sequence.finish_reason]
            metrics.count("vllm:request_success", finished_reason=reason)
        if constraint is not None:
            kind = kind_of(constraint)
            metrics.count("dsbd:constrained_tokens", sum(num_tokens), constraint=kind)
            metrics.count("dsbd:constrained_iterations", stats.num_iterations, constraint=kind)

    def cancelled(self) -> None:
        self._metrics.count("dsbd:requests_cancelled")


class _ServiceCollector(Collector):
    def __init__(self, service: Service, model_name: str) -> None:
        self._service = service
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._service.stats()
        usage = stats.rows_in_use / stats.max_rows if stats.max_rows else 0.0
        reserved = "Rows that running requests were expected to need."
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that share the engine.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests in the queue.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the cache rows in use, 1 is all.", usage),
            ("dsbd:kv_rows_in_use", "Cache rows in use.", stats.rows_in_use),
            ("dsbd:kv_rows_reserved", reserved, stats.rows_reserved),
            ("dsbd:kv_bytes", "Bytes of both engines' caches.", stats.kv_bytes),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        preemptions = CounterMetricFamily(
            "vllm:num_preemptions", "Requests that gave up their rows.", labels=["model_name"]
        )
        preemptions.add_metric([self._model_name], stats.num_preemptions)
        yield preemptions
