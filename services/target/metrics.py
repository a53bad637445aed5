"""The target's metrics. Counters of tokens and rounds are the sums of all its tags."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram
from slipstream.v1 import common_pb2

from services.link.round import RoundResult
from services.serving.metrics import LATENCY_BUCKETS
from services.target.scheduler import Scheduler
from services.target.stopping import Finish

PREFIX = "slipstream_target"

REQUESTS = Counter(f"{PREFIX}_requests", "Requests that ended, by finish reason and active mode.", ["reason", "mode"])
REQUEST_SECONDS = Histogram(f"{PREFIX}_request_seconds", "From arrival to end.", ["mode"], buckets=LATENCY_BUCKETS)
QUEUE_SECONDS = Histogram(f"{PREFIX}_queue_seconds", "From arrival to the first pass.", buckets=LATENCY_BUCKETS)
TOKENS = Counter(f"{PREFIX}_tokens", "Emitted tokens by origin.", ["origin"])
ROUNDS = Counter(f"{PREFIX}_spec_steps", "Rounds that verified at least one proposed token.")
DRAFT_TOKENS = Counter(f"{PREFIX}_draft_tokens", "Proposed tokens that were verified.")
ACCEPTED = Counter(f"{PREFIX}_accepted_draft_tokens", "Proposed tokens that were accepted and emitted.")
ACCEPTED_AT = Counter(f"{PREFIX}_accepted_at_position", "Accepted tokens by position in their round.", ["position"])
PROPOSED_AT = Counter(f"{PREFIX}_proposed_at_position", "Verified tokens by position in their round.", ["position"])
FALLBACKS = Counter(f"{PREFIX}_fallbacks", "Rounds of requests that went without a proposal, by reason.", ["reason"])
STALE = Counter(f"{PREFIX}_stale_proposals", "Proposals dropped because they came too late.")
PASSES = Counter(f"{PREFIX}_passes", "Passes of the model.")
ROWS = Counter(f"{PREFIX}_rows", "Rows of all passes.")
STEP_SECONDS = Histogram(f"{PREFIX}_step_seconds", "Time of the steps of a round.", ["step"], buckets=LATENCY_BUCKETS)
WAITING = Gauge(f"{PREFIX}_waiting_requests", "Requests in the queue.")
RUNNING = Gauge(f"{PREFIX}_running_requests", "Requests that take part in passes.")
CACHE_BLOCKS = Gauge(f"{PREFIX}_cache_blocks", "Blocks of the key-value cache, by state.", ["state"])
DRAFT_ATTACHED = Gauge(f"{PREFIX}_draft_attached", "1 while a draft is attached.")
INFO = Gauge(
    f"{PREFIX}_model_info", "The model that is served.", ["model", "compute_path", "weight_format", "fingerprint"]
)


def observe_load(scheduler: Scheduler) -> None:
    WAITING.set(len(scheduler.waiting))
    RUNNING.set(len(scheduler.running))
    CACHE_BLOCKS.labels("free").set(scheduler.blocks.free)
    CACHE_BLOCKS.labels("used").set(scheduler.blocks.total - scheduler.blocks.free)


def observe_proposals(result: RoundResult) -> None:
    if result.draft_time_s or result.link_time_s:
        STEP_SECONDS.labels("draft").observe(result.draft_time_s)
        STEP_SECONDS.labels("link").observe(result.link_time_s)


def observe_pass(seconds: float, rows: int) -> None:
    PASSES.inc()
    ROWS.inc(rows)
    STEP_SECONDS.labels("pass").observe(seconds)


def observe_round(drafted: int, accepted: int) -> None:
    for position in range(drafted):
        PROPOSED_AT.labels(position + 1).inc()
        if position < accepted:
            ACCEPTED_AT.labels(position + 1).inc()


def observe_request(reason: Finish, tag: common_pb2.OptimizationTag, seconds: float) -> None:
    mode = "speculative" if tag.active_mode == common_pb2.MODE_SPECULATIVE else "standard"
    REQUESTS.labels(reason.value.lower(), mode).inc()
    REQUEST_SECONDS.labels(mode).observe(seconds)
    QUEUE_SECONDS.observe(tag.time.queue_ms / 1e3)
    for origin in ("accepted", "correction", "bonus", "standard"):
        TOKENS.labels(origin).inc(getattr(tag.tokens_by_origin, origin))
    ROUNDS.inc(tag.num_spec_steps)
    DRAFT_TOKENS.inc(tag.num_draft_tokens)
    ACCEPTED.inc(tag.num_accepted_draft_tokens)
    STALE.inc(tag.stale_proposals)
    for fallback in tag.fallbacks:
        name = common_pb2.FallbackReason.Name(fallback.reason).removeprefix("FALLBACK_REASON_").lower()
        FALLBACKS.labels(name).inc(fallback.rounds)
