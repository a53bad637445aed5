"""A drafter without a model, a draft's server around it, and a link to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
from slipstream.v1 import common_pb2, draft_pb2, draft_pb2_grpc

from services.draft.servicer import DraftServicer
from services.link.client import DraftLink
from services.link.round import ContextUpdate, SequenceDraft

VOCABULARY = 64
HIDDEN = 4
TARGET = common_pb2.ModelInfo(
    model_id="target",
    weights_fingerprint="sha256:target",
    tokenizer_fingerprint="sha256:tokens",
    vocabulary_size=VOCABULARY,
    context_limit=1024,
)
GREEDY = common_pb2.SamplingParams(top_p=1, repetition_penalty=1, verification=common_pb2.VERIFICATION_BLOCK)


def draft_info(**changes: object) -> draft_pb2.DraftServiceGetInfoResponse:
    model = {
        "model_id": "draft",
        "weights_fingerprint": "sha256:draft",
        "tokenizer_fingerprint": "sha256:tokens",
        "vocabulary_size": VOCABULARY,
        "context_limit": 1024,
    }
    model.update({k: v for k, v in changes.items() if k in model})
    rest = {k: v for k, v in changes.items() if k not in model}
    fields = {"drafters": ["counting"], "max_draft_length": 8, "context_limit": 512, "max_sequences": 4, **rest}
    return draft_pb2.DraftServiceGetInfoResponse(model=common_pb2.ModelInfo(**model), **fields)


class CountingDrafter:
    """Guesses that each token is followed by the next number, with q as likely as asked: 3/4 on the guess, 1/4 on token 0."""

    def __init__(
        self, info: draft_pb2.DraftServiceGetInfoResponse | None = None, columns: Sequence[int] | None = None
    ) -> None:
        self.info = info or draft_info()
        self.name = self.info.drafters[0]
        self.columns = None if columns is None else np.array(columns, np.int32)
        self.hidden_size = HIDDEN if self.info.feature_layers else 0
        self.passes = 0
        self.tokens: dict[int, list[int]] = {}
        """What it was told, by its own id of the sequence."""
        self.features: dict[int, list[np.ndarray]] = {}
        self.request_ids: list[str] = []
        self.go = threading.Event()
        """Cleared: every round waits until it is set."""
        self.go.set()
        self.spoil: Callable[[SequenceDraft], SequenceDraft] = lambda draft: draft
        """Makes an answer wrong."""
        self.failure: Exception | None = None

    @property
    def held(self) -> int:
        return len(self.tokens)

    def propose(self, updates: Sequence[ContextUpdate]) -> list[SequenceDraft]:
        assert self.go.wait(30)
        if self.failure is not None:
            raise self.failure
        self.passes += 1
        return [self.spoil(self._guess(update)) for update in updates]

    def _guess(self, update: ContextUpdate) -> SequenceDraft:
        if update.start:
            self.tokens[update.sequence_id] = []
            self.features[update.sequence_id] = []
            self.request_ids.append(update.request_id)
        if update.sequence_id not in self.tokens:
            return SequenceDraft(update.committed_length, [], None, common_pb2.FALLBACK_REASON_DRAFT_INVALID)
        told = self.tokens[update.sequence_id]
        told.extend(update.tokens)
        if update.features is not None:
            self.features[update.sequence_id].append(update.features)
        guesses = [(told[-1] + 1 + i) % VOCABULARY for i in range(update.draft_length)]
        width = VOCABULARY if self.columns is None else len(self.columns)
        q = None
        if update.want_distribution and guesses:
            places = guesses if self.columns is None else np.searchsorted(self.columns, guesses)
            q = np.zeros((len(guesses), width), np.float32)
            q[:, 0] = 0.25
            q[np.arange(len(guesses)), places] += 0.75
        return SequenceDraft(update.committed_length, guesses, q)

    def release(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self.tokens.pop(sequence_id, None)


def opening(sequence_id: int, tokens: Sequence[int], draft_length: int, **rest: object) -> ContextUpdate:
    """The first round of a sequence."""
    fields = {"start": True, "sampling": GREEDY, "request_id": f"request-{sequence_id}", **rest}
    return ContextUpdate(sequence_id, len(tokens), tokens, draft_length, **fields)


def following(sequence_id: int, length: int, tokens: Sequence[int], draft_length: int, **rest: object) -> ContextUpdate:
    """A later round."""
    return ContextUpdate(sequence_id, length, tokens, draft_length, **rest)


@contextmanager
def served(servicer: draft_pb2_grpc.DraftServiceServicer, socket: Path) -> Iterator[grpc.Server]:
    """A draft's server on a Unix socket."""
    server = grpc.server(ThreadPoolExecutor(8))
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield server
    finally:
        server.stop(grace=None).wait()


@contextmanager
def linked(
    drafter: CountingDrafter,
    folder: Path,
    *,
    budget_s: float = 5.0,
    target: common_pb2.ModelInfo = TARGET,
    shm: bool = True,
) -> Iterator[DraftLink]:
    """A link that is attached to a draft of this process."""
    with served(DraftServicer(drafter, folder if shm else None), folder / "draft.sock"):
        link = DraftLink(f"unix:{folder / 'draft.sock'}", target, HIDDEN, budget_s, folder)
        link.start()
        try:
            eventually(lambda: link.state.ready)
            yield link
        finally:
            drafter.go.set()
            link.close()


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until something holds that another thread or process brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)
