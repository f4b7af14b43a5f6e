"""What the server counts, under vLLM's names, so that its dashboards fit."""

import collections
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from spec_jax.outputs import RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class _Recent:
    """What requests that have ended lately have added up to."""

    SECONDS = 60.0

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._counts: collections.deque[tuple[float, int, int, int]] = collections.deque()

    def add(self, tokens: int, drafts: int, drafted: int) -> None:
        """Adds the counts of a request."""
        self._counts.append((time.monotonic(), tokens, drafts, drafted))
        self._sums()

    def _sums(self) -> list[int]:
        now = time.monotonic()
        while self._counts and self._counts[0][0] < now - self.SECONDS:
            self._counts.popleft()
        return [sum(each) for each in zip(*(row[1:] for row in self._counts), strict=True)]

    def speed(self) -> float:
        """Tokens a second."""
        sums = self._sums()
        seconds = min(self.SECONDS, time.monotonic() - self._began)
        return sums[0] / seconds if sums else 0.0

    def draft_length(self) -> float:
        """Tokens of a draft (K), on average."""
        sums = self._sums()
        return sums[2] / sums[1] if sums and sums[1] else 0.0


class Metrics:
    """The counters, gauges and histograms of one server.

    Args:
      model: the name that the model is served by.
      prefix: before every name.
      running, waiting, slots: read when the metrics are; slots is how many requests fit at once.
    """

    def __init__(
        self,
        model: str,
        prefix: str,
        running: Callable[[], float],
        waiting: Callable[[], float],
        slots: Callable[[], float],
    ):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._prefix = prefix
        self._gauge("num_requests_running", "Requests that are decoded", running)
        self._gauge("num_requests_waiting", "Requests that wait for a slot", waiting)
        self._recent = _Recent()
        self._gauge("generation_tokens_per_second", "Tokens a second, lately", self._recent.speed)
        self._gauge("spec_decode_draft_length", "Tokens a draft, lately", self._recent.draft_length)
        self._gauge("kv_cache_usage_perc", "Share of the slots in use", lambda: running() / slots())
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._queries = self._counter("prefix_cache_queries", "Tokens of prompts, once more")
        self._hits = self._counter("prefix_cache_hits", "Tokens of prompts that were copied")
        self._rounds = self._counter("spec_decode_num_drafts", "Target calls after prompts")
        self._plain = self._counter("spec_decode_num_plain_rounds", "Target calls without a draft")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Tokens drafted")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafts accepted")
        self._by_position = self._family(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted by position",
            ("position",),
        )
        self._finished = self._family(
            Counter, "request_success", "Requests that have ended", ("finished_reason",)
        )
        self.first_token = self._histogram("time_to_first_token_seconds", "To the first", _LATENCY)
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "Between tokens", _BETWEEN_TOKENS
        )
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "Whole", _LATENCY)
        self._prefill = self._histogram("request_prefill_time_seconds", "Prompt", _LATENCY)
        self._decode = self._histogram("request_decode_time_seconds", "Rounds", _LATENCY)
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens", _TOKENS)
        self._answer_size = self._histogram("request_generation_tokens", "Tokens", _TOKENS)

    def _family(self, kind: type, name: str, text: str, labels: tuple[str, ...] = (), **more):
        names = (*self._labels, *labels)
        return kind(self._prefix + name, text, names, registry=self.registry, **more)

    def _counter(self, name: str, text: str) -> Counter:
        return self._family(Counter, name, text).labels(**self._labels)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return self._family(Histogram, name, text, buckets=bounds).labels(**self._labels)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._family(Gauge, name, text).labels(**self._labels).set_function(read)

    def add(self, output: RequestOutput) -> None:
        """Counts a finished completion."""
        completion = output.outputs[0]
        metrics, prompt = completion.metrics, len(output.prompt_token_ids)
        self._finished.labels(**self._labels, finished_reason=completion.finish_reason).inc()
        self._prompt_tokens.inc(prompt)
        self._queries.inc(prompt)
        self._hits.inc(output.num_cached_tokens)
        self._generated.inc(metrics.completion_tokens)
        self._rounds.inc(metrics.rounds)
        self._plain.inc(metrics.plain_rounds)
        self._drafted.inc(metrics.draft_tokens)
        self._accepted.inc(metrics.accepted_tokens)
        for position, count in enumerate(metrics.accepted_per_position):
            self._by_position.labels(**self._labels, position=str(position)).inc(count)
        self._prefill.observe(metrics.prefill_seconds)
        self._decode.observe(metrics.decode_seconds)
        self._prompt_size.observe(prompt)
        self._answer_size.observe(metrics.completion_tokens)
        drafts = metrics.rounds - metrics.plain_rounds
        self._recent.add(metrics.completion_tokens, drafts, metrics.draft_tokens)

    def text(self) -> bytes:
        """The metrics in Prometheus's format."""
        return generate_latest(self.registry)
