"""Prometheus metrics of a server, under vLLM's names where they exist, else under ``dsbd:``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dsbd_ort.constraints.plain_data import kind_of
from dsbd_ort.decoding import DecodingStats
from dsbd_ort.engine import Service
from dsbd_ort.openai_server.protocol import FINISH_REASONS
from dsbd_ort.results import GenerationResult, StreamPiece
from dsbd_ort.speech.transcript import Transcript

Clock = Callable[[], float]

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKENS = tuple(float(2**power) for power in range(17))


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, service: Service, model_name: str, clock: Clock) -> None:
        """``clock`` counts seconds."""
        self.registry = CollectorRegistry()
        self.clock = clock
        self.registry.register(_ServiceCollector(service, model_name))
        self._labels = {"model_name": model_name}
        counter, histogram = self._counter, self._histogram
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens returned.")
        self.num_drafts = counter("vllm:spec_decode_num_drafts", "Drafted forests.")
        self.num_draft_tokens = counter(
            "vllm:spec_decode_num_draft_tokens", "Drafted tokens, all branches counted."
        )
        self.num_accepted_tokens = counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were committed."
        )
        self.audio_seconds = counter("dsbd:audio_seconds", "Seconds of audio transcribed.")
        self.num_cancelled = counter("dsbd:requests_cancelled", "Requests cancelled.")
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _LONG
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Between two pieces with new tokens.", _SHORT
        )
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Per token after the first.", _SHORT
        )
        self.end_to_end = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _LONG
        )
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.output_length = histogram(
            "vllm:request_generation_tokens", "Tokens of a sequence.", _TOKENS
        )
        self._succeeded = self._labelled_counter(
            "vllm:request_success", "Sequences returned, by finish reason.", "finished_reason"
        )
        self._drafted = self._labelled_counter(
            "dsbd:drafted_tokens", "Drafted tokens, by the request's drafter.", "drafter"
        )
        self._accepted = self._labelled_counter(
            "dsbd:accepted_tokens", "Drafted tokens that were committed, by drafter.", "drafter"
        )
        kind = "constraint"
        self._constrained_tokens = self._labelled_counter(
            "dsbd:constrained_tokens", "Tokens returned under a constraint, by its kind.", kind
        )
        self._constrained_iterations = self._labelled_counter(
            "dsbd:constrained_iterations", "Iterations under a constraint, by its kind.", kind
        )
        self._responses = self._labelled_counter(
            "dsbd:http_answers", "HTTP responses.", "path", "status"
        )

    def count_success(self, finish_reason: str) -> None:
        """Count a returned sequence."""
        self._succeeded.labels(**self._labels, finished_reason=finish_reason).inc()

    def count_drafted(self, stats: DecodingStats) -> None:
        """Count what a request drafted."""
        self.num_drafts.inc(stats.num_iterations)
        self.num_draft_tokens.inc(stats.num_draft_tokens)
        self.num_accepted_tokens.inc(stats.num_accepted_tokens)
        labels = {**self._labels, "drafter": stats.drafter}
        self._drafted.labels(**labels).inc(stats.num_draft_tokens)
        self._accepted.labels(**labels).inc(stats.num_accepted_tokens)

    def count_transcript(self, transcript: Transcript, seconds: float) -> None:
        """Count an audio that was transcribed, so many seconds after its request."""
        self.audio_seconds.inc(transcript.duration)
        self.end_to_end.observe(seconds)
        self.prompt_tokens.inc(transcript.stats.num_prompt_tokens)
        self.generation_tokens.inc(transcript.stats.num_output_tokens)
        if transcript.stats.num_draft_tokens:
            self.count_drafted(transcript.stats)

    def count_constrained(self, kind: str, result: GenerationResult) -> None:
        """Count a request that ended under a constraint of this kind."""
        num_tokens = sum(len(sequence.token_ids) for sequence in result.sequences)
        labels = {**self._labels, "constraint": kind}
        self._constrained_tokens.labels(**labels).inc(num_tokens)
        self._constrained_iterations.labels(**labels).inc(result.stats.num_iterations)

    def count_response(self, path: str, status: int) -> None:
        """Count an HTTP response; ``path`` is a label, so it must be one of few."""
        self._responses.labels(**self._labels, path=path, status=str(status)).inc()

    def _labelled_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*self._labels, *labels), registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return self._labelled_counter(name, text).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        names = tuple(self._labels)
        histogram = Histogram(name, text, names, buckets=buckets, registry=self.registry)
        return histogram.labels(**self._labels)


class RequestMeter:
    """Measures one HTTP request from its arrival on."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = metrics.clock()
        self._last_token_by_index: dict[int, float] = {}

    def piece(self, index: int, piece: StreamPiece) -> None:
        """Record a piece of the engine request with this index."""
        if not piece.token_ids:
            return
        now = self._metrics.clock()
        if index in self._last_token_by_index:
            self._metrics.inter_token.observe(now - self._last_token_by_index[index])
        else:
            self._metrics.first_token.observe(now - self._arrived)
        self._last_token_by_index[index] = now

    def result(self, result: GenerationResult, constraint: Any = None) -> None:
        """Record a finished engine request, and what it was constrained to."""
        metrics, stats = self._metrics, result.stats
        if constraint is not None:
            metrics.count_constrained(kind_of(constraint), result)
        metrics.end_to_end.observe(metrics.clock() - self._arrived)
        metrics.prompt_tokens.inc(stats.num_prompt_tokens)
        metrics.prompt_length.observe(stats.num_prompt_tokens)
        if stats.time_per_output_token_s is not None:
            metrics.per_token.observe(stats.time_per_output_token_s)
        if stats.num_draft_tokens:
            metrics.count_drafted(stats)
        for sequence in result.sequences:
            metrics.generation_tokens.inc(len(sequence.token_ids))
            metrics.output_length.observe(len(sequence.token_ids))
            metrics.count_success(FINISH_REASONS[sequence.finish_reason])

    def cancelled(self) -> None:
        """Record that the request was cancelled."""
        self._metrics.num_cancelled.inc()


class _ServiceCollector(Collector):
    """Numbers of the engine, read at each scrape."""

    def __init__(self, service: Service, model_name: str) -> None:
        self._service = service
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges, and the counter of preemptions."""
        stats = self._service.stats()
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that share the engine.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests in the queue.", stats.num_waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the cache rows in use, 1 is all.",
                stats.rows_in_use / stats.max_rows if stats.max_rows else 0.0,
            ),
            ("dsbd:kv_rows_in_use", "Cache rows in use.", stats.rows_in_use),
            (
                "dsbd:kv_rows_reserved",
                "Rows that running requests were expected to need.",
                stats.rows_reserved,
            ),
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
