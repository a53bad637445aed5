"""The draft's metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.serving.metrics import LATENCY_BUCKETS

PREFIX = "slipstream_draft"

ATTACHED = Gauge(f"{PREFIX}_attached_targets", "Targets that are attached.")
ROUNDS = Counter(f"{PREFIX}_rounds", "Rounds answered.")
TOKENS = Counter(f"{PREFIX}_proposed_tokens", "Tokens proposed.")
REFUSALS = Counter(f"{PREFIX}_refusals", "Sequences refused in a round, by reason.", ["reason"])
PASSES = Counter(f"{PREFIX}_passes", "Passes of the draft.")
ROUND_SECONDS = Histogram(f"{PREFIX}_round_seconds", "The draft's computing for a round.", buckets=LATENCY_BUCKETS)
SEQUENCES = Gauge(f"{PREFIX}_sequences", "Sequences held.")
INFO = Gauge(f"{PREFIX}_model_info", "The draft's model.", ["model", "drafter", "compute_path", "fingerprint"])
