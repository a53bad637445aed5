"""A model that is an oracle of bookkeeping: what it says next depends on every token that its cache really holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from slipstream.v1 import common_pb2, draft_pb2

from services.link.round import ContextUpdate, LinkState, RoundResult, SequenceDraft
from services.model.forward import BLOCK_SIZE, PassOutput, SequenceRows

VOCABULARY = 64
HIDDEN = 4


class FakePass:
    """Row-invariant by construction: logits are a hash of the tokens at the places that a row sees.

    A wrong block, a token that was not rolled back, a row at a wrong place: each changes the answer.
    """

    vocabulary_size = VOCABULARY
    hidden_size = HIDDEN
    num_layers = 2
    context_limit = 512
    compute_path = "fake"
    compute_path_reason = "a test"
    weight_format = "none"
    cache_bytes_per_block = 0

    def __init__(self) -> None:
        self.places = np.full((0, BLOCK_SIZE), -1, np.int64)
        self.passes = 0
        self.rows = 0
        self.fail: Callable[[], None] = lambda: None

    def allocate_cache(self, num_blocks: int) -> None:
        self.places = np.full((num_blocks, BLOCK_SIZE), -1, np.int64)

    def run(self, batch: Sequence[SequenceRows], feature_layers: Sequence[int] = ()) -> PassOutput:
        self.fail()
        self.passes += 1
        logits, features = [], []
        for rows in batch:
            for i, token in enumerate(rows.tokens):
                self.rows += 1
                place = rows.base + i
                self.places[rows.blocks[place // BLOCK_SIZE], place % BLOCK_SIZE] = token
                seen = [int(self.places[rows.blocks[p // BLOCK_SIZE], p % BLOCK_SIZE]) for p in range(place + 1)]
                assert -1 not in seen, "a row sees a place that was never written"
                features.append(feature_of(seen))
                if i >= len(rows.tokens) - rows.logits:
                    logits.append(next_logits(seen))
        found = torch.stack(logits) if logits else torch.zeros(0, VOCABULARY)
        return PassOutput(found, torch.stack(features)[:, None].bfloat16() if feature_layers else None)

    def keep(self, rows: SequenceRows, path: Sequence[int]) -> None:
        raise NotImplementedError


def next_logits(tokens: Sequence[int]) -> torch.Tensor:
    """What the fake model says after these tokens, [VOCABULARY]."""
    digest = hashlib.sha256(repr(list(tokens)).encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return torch.from_numpy(generator.normal(0, 2, VOCABULARY).astype(np.float32))


def feature_of(tokens: Sequence[int]) -> torch.Tensor:
    """The fake hidden state of the last of these tokens: its place (modulo 128: bfloat16 must hold it) and value."""
    return torch.tensor([len(tokens) % 128, tokens[-1], 0, 0], dtype=torch.float32)


def standard_answer(prompt: Sequence[int], count: int) -> list[int]:
    """What greedy standard decoding answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(next_logits(tokens).argmax()))
    return tokens[len(prompt) :]


class FakeLink:
    """A draft in the test's hands: it guesses right with some probability, and keeps what it was told, as the real one does."""

    def __init__(self, right: float = 0.6, seed: int = 0, feature_layers: Sequence[int] = (1,)) -> None:
        self.right = right
        self.random = np.random.default_rng(seed)
        self.told: dict[int, list[int]] = {}
        self.features: dict[int, int] = {}
        self.ready = True
        self.session = 1
        self.reason = common_pb2.FALLBACK_REASON_DRAFT_ABSENT
        self.next_result: RoundResult | None = None
        self.calls = 0
        self.released: list[int] = []
        model = common_pb2.ModelInfo(model_id="fake", weights_fingerprint="sha256:d", vocabulary_size=VOCABULARY)
        self.info = draft_pb2.DraftServiceGetInfoResponse(
            model=model, drafters=["fake"], max_draft_length=16, context_limit=400, feature_layers=feature_layers
        )

    @property
    def state(self) -> LinkState:
        if not self.ready:
            return LinkState(False, self.reason)
        return LinkState(True, common_pb2.FALLBACK_REASON_UNSPECIFIED, self.session, self.info)

    def new_session(self) -> None:
        self.session += 1
        self.told.clear()

    def propose(self, updates: Sequence[ContextUpdate], session_number: int | None = None) -> RoundResult:
        assert session_number in (None, self.session)
        self.calls += 1
        drafts = {update.sequence_id: self._draft(update) for update in updates}
        if self.next_result is not None:
            result, self.next_result = self.next_result, None
            return result
        return RoundResult(drafts, draft_time_s=0.001, link_time_s=0.001, draft_passes=1)

    def _draft(self, update: ContextUpdate) -> SequenceDraft:
        if update.start:
            self.told[update.sequence_id] = []
            assert update.sampling is not None
        self._check_features(update)
        told = self.told[update.sequence_id]
        told.extend(update.tokens)
        guesses: list[int] = []
        whole = len(told) == update.committed_length  # A draft that started late does not know what came before.
        for _ in range(update.draft_length):
            right = int(next_logits(told + guesses).argmax()) if whole else 0
            guesses.append(right if self.random.random() < self.right else int(self.random.integers(VOCABULARY)))
        return SequenceDraft(update.committed_length, guesses, None)

    def _check_features(self, update: ContextUpdate) -> None:
        """Each pair must be (the feature of a token, the token behind it)."""
        if not self.info.feature_layers:
            return
        tokens = list(update.tokens)
        before = tokens[:-1] if update.start else [self.told[update.sequence_id][-1], *tokens[:-1]]
        assert update.features is not None
        rows = torch.from_numpy(update.features.copy()).view(torch.bfloat16).float()[:, 0]
        assert rows[:, 1].tolist() == before
        last = update.committed_length - 1
        assert rows[:, 0].tolist() == [place % 128 for place in range(last - len(before) + 1, last + 1)]

    def release(self, sequence_ids: Sequence[int]) -> None:
        self.released.extend(sequence_ids)
        for sequence_id in sequence_ids:
            self.told.pop(sequence_id, None)


class FakeStream:
    """Text of the fake model's tokens: one letter each."""

    def push(self, token: int) -> str:
        return letter(token)

    def flush(self) -> str:
        return ""


def letter(token: int) -> str:
    return chr(ord("0") + token)
