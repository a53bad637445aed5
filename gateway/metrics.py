"""The gateway's metrics. Its counters are the sums of the tags that it sent or recorded."""

from __future__ import annotations

import grpc
from prometheus_client import Counter, Gauge, Histogram
from slipstream.v1 import common_pb2

from gateway.record import Record, finish_word, mode_word
from services.serving.metrics import LATENCY_BUCKETS

PREFIX = "slipstream_gateway"

REQUESTS = Counter(f"{PREFIX}_requests", "Requests that ended, by finish reason and active mode.", ["reason", "mode"])
REFUSED = Counter(f"{PREFIX}_refused_requests", "Requests that ended before they started, by gRPC status.", ["status"])
WAITING = Gauge(f"{PREFIX}_waiting_requests", "Requests in the queue.")
RUNNING = Gauge(f"{PREFIX}_running_requests", "Requests at the target.")
FIRST_TOKEN_SECONDS = Histogram(
    f"{PREFIX}_first_token_seconds", "To the first token.", ["mode"], buckets=LATENCY_BUCKETS
)
REQUEST_SECONDS = Histogram(f"{PREFIX}_request_seconds", "From arrival to end.", ["mode"], buckets=LATENCY_BUCKETS)
TOKEN_SECONDS = Histogram(
    f"{PREFIX}_token_seconds", "Mean time between tokens of a request.", ["mode"], buckets=LATENCY_BUCKETS
)
PROMPT_TOKENS = Counter(f"{PREFIX}_prompt_tokens", "Tokens of prompts.")
TOKENS = Counter(f"{PREFIX}_tokens", "Tokens of answers by origin.", ["origin"])
ROUNDS = Counter(f"{PREFIX}_spec_steps", "Rounds that verified at least one proposed token.")
DRAFT_TOKENS = Counter(f"{PREFIX}_draft_tokens", "Proposed tokens that were verified.")
ACCEPTED = Counter(f"{PREFIX}_accepted_draft_tokens", "Proposed tokens that were accepted and emitted.")
ROUNDS_BY_ACCEPTED = Counter(f"{PREFIX}_rounds_by_accepted", "Rounds by accepted tokens.", ["accepted"])
STEP_SECONDS = Counter(f"{PREFIX}_step_seconds", "Wall time of requests by step.", ["step"])
FALLBACKS = Counter(f"{PREFIX}_fallbacks", "Rounds that went without a proposal, by reason.", ["reason"])


def observe(record: Record, reason: common_pb2.FinishReason, status: grpc.StatusCode) -> None:
    """Count a request that has ended. One that never started has no mode and no latency."""
    if record.started is None:
        REQUESTS.labels(finish_word(reason), "none").inc()
        REFUSED.labels(status.name).inc()
        return
    tag, usage = record.tag(), record.usage()
    mode = mode_word(tag.active_mode)
    REQUESTS.labels(finish_word(reason), mode).inc()
    _observe_latency(record, mode, usage.completion_tokens)
    PROMPT_TOKENS.inc(usage.prompt_tokens)
    for origin in common_pb2.TokensByOrigin.DESCRIPTOR.fields:
        TOKENS.labels(origin.name).inc(getattr(tag.tokens_by_origin, origin.name))
    ROUNDS.inc(tag.num_spec_steps)
    DRAFT_TOKENS.inc(tag.num_draft_tokens)
    ACCEPTED.inc(tag.num_accepted_draft_tokens)
    for accepted, rounds in enumerate(tag.acceptance_histogram):
        ROUNDS_BY_ACCEPTED.labels(accepted).inc(rounds)
    for step in common_pb2.TimeSplit.DESCRIPTOR.fields:
        STEP_SECONDS.labels(step.name.removesuffix("_ms")).inc(getattr(tag.time, step.name) / 1e3)
    for fallback in tag.fallbacks:
        name = common_pb2.FallbackReason.Name(fallback.reason).removeprefix("FALLBACK_REASON_").lower()
        FALLBACKS.labels(name).inc(fallback.rounds)


def _observe_latency(record: Record, mode: str, tokens: int) -> None:
    REQUEST_SECONDS.labels(mode).observe(record.seconds)
    if record.first_token_s is None or record.last_token_s is None:
        return
    FIRST_TOKEN_SECONDS.labels(mode).observe(record.first_token_s)
    if tokens > 1:
        TOKEN_SECONDS.labels(mode).observe((record.last_token_s - record.first_token_s) / (tokens - 1))
