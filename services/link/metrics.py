"""The link's metrics, in both processes."""

from __future__ import annotations

from prometheus_client import Counter

PREFIX = "slipstream_link"

INLINE = Counter(f"{PREFIX}_inline_tensors", "Tensors that this process sent inside a message, not in shared memory.")
SESSIONS = Counter(f"{PREFIX}_sessions", "Sessions that this process opened with the other.")
ENDS = Counter(f"{PREFIX}_session_ends", "Sessions that ended, by reason.", ["reason"])
ROUNDS = Counter(f"{PREFIX}_rounds", "Rounds that asked for guesses, by outcome.", ["outcome"])
