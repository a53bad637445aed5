"""``python -m bench.link``: what a round costs besides the models' time.

A real draft process with a drafter that answers at once, and the target's end of the link in this process: greedy
rounds with the states of two tokens, and sampled rounds with a q of four guesses, through shared memory and inline.
Median and 90th percentile, ms.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from slipstream.v1 import common_pb2, draft_pb2

from services.link.client import DraftLink
from services.link.round import ContextUpdate, SequenceDraft

HIDDEN, LAYERS, COLUMNS, GUESSES, ROUNDS = 576, 3, 12_288, 4, 1000
TARGET = common_pb2.ModelInfo(
    model_id="target", weights_fingerprint="a", tokenizer_fingerprint="t", vocabulary_size=49_152, context_limit=8192
)


class Instant:
    """A drafter that takes no time: what is left is the link."""

    name = "instant"
    columns = np.arange(COLUMNS, dtype=np.int32)
    hidden_size = HIDDEN
    held = 0
    passes = 0

    def __init__(self) -> None:
        model = common_pb2.ModelInfo()
        model.CopyFrom(TARGET)
        model.weights_fingerprint = "b"
        self.info = draft_pb2.DraftServiceGetInfoResponse(
            model=model,
            drafters=[self.name],
            max_draft_length=16,
            context_limit=4096,
            max_sequences=16,
            feature_layers=list(range(LAYERS)),
        )
        self._q = np.full((GUESSES, COLUMNS), 1 / COLUMNS, np.float32)

    def propose(self, updates: Sequence[ContextUpdate]) -> list[SequenceDraft]:
        return [
            SequenceDraft(u.committed_length, [1] * u.draft_length, self._q if u.want_distribution else None)
            for u in updates
        ]

    def release(self, sequence_ids: Sequence[int]) -> None:
        pass


def drafter(_settings: object) -> Instant:
    """For SLIPSTREAM_DRAFT_DRAFTER."""
    return Instant()


def rounds(link: DraftLink, sampled: bool) -> dict[str, float]:
    """Milliseconds a round."""
    sampling = common_pb2.SamplingParams(
        temperature=float(sampled), top_p=1, repetition_penalty=1, verification=common_pb2.VERIFICATION_BLOCK
    )
    features = np.zeros((2, LAYERS, HIDDEN), np.uint16)
    times = []
    for i in range(ROUNDS):
        tokens = [1, 2, 3] if i == 0 else [1, 2]
        update = ContextUpdate(1, 3 + 2 * i, tokens, GUESSES, i == 0, sampling, features, want_distribution=sampled)
        started = time.perf_counter()
        result = link.propose([update])
        times.append((time.perf_counter() - started) * 1e3)
        assert len(result.drafts[1].tokens) == GUESSES
    link.release([1])
    return {"p50": round(statistics.median(times), 3), "p90": round(statistics.quantiles(times, n=10)[8], 3)}


def main() -> int:
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "run" / "draft.sock"
        environment = {
            **os.environ,
            "SLIPSTREAM_DRAFT_SOCKET": str(socket),
            "SLIPSTREAM_DRAFT_DRAFTER": "bench.link:drafter",
            "SLIPSTREAM_DRAFT_LOG_LEVEL": "error",
        }
        draft = subprocess.Popen([sys.executable, "-m", "services.draft"], env=environment)
        try:
            for name, memory in (("shared memory", Path("/dev/shm")), ("inline", None)):
                link = DraftLink(f"unix:{socket}", TARGET, HIDDEN, 5.0, memory)
                link.start()
                while not link.state.ready:
                    time.sleep(0.05)
                report[name] = {"greedy": rounds(link, False), "sampled": rounds(link, True)}
                link.close()
        finally:
            draft.terminate()
            draft.wait()
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
