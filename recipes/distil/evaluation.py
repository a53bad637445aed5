"""What a draft is worth: its real greedy chains against the target's greedy text, on prompts that it never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.distil.chains import Chains
from recipes.distil.corpus import Corpus, CorpusSequence
from services.draft.feature_head import FeatureHead


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Rounds of draft length k, counted."""

    draft_length: int
    rounds: int
    histogram: tuple[int, ...]
    """Rounds that accepted 0, 1, ... k guesses."""

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of rounds in which the guess at position 1, 2, ... k was accepted."""
        return tuple(sum(self.histogram[i:]) / max(1, self.rounds) for i in range(1, self.draft_length + 1))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted a round: 1 + accepted / rounds."""
        accepted = sum(i * count for i, count in enumerate(self.histogram))
        return 1 + accepted / max(1, self.rounds)


def rounds_of(agreement: Sequence[int]) -> list[int]:
    """Accepted lengths of the rounds that decoding would make.

    ``agreement[i]`` is how many guesses of a chain that starts at place i agree with the text; a round at place i moves
    on by that and the correction or bonus token.
    """
    accepted, place = [], 0
    while place < len(agreement):
        accepted.append(agreement[place])
        place += agreement[place] + 1
    return accepted


@torch.inference_mode()
def agreement(draft: FeatureHead, tokens: Tensor, features: Tensor, first: int, draft_length: int) -> list[int]:
    """Guesses in a row agreeing with ``tokens`` [L], of each chain from pair ``first`` to ``L - 2 - draft_length``."""
    starts = torch.arange(first, len(tokens) - 1 - draft_length).unsqueeze(0)
    if starts.numel() == 0:
        return []
    chains = Chains(draft, tokens.unsqueeze(0), features[:-1].unsqueeze(0), starts)
    h = chains.first()
    alive = torch.ones_like(starts, dtype=torch.bool)
    agreed = torch.zeros_like(starts)
    for step in range(draft_length):
        guess = draft.vocabulary.long()[draft.logits(h).argmax(-1)]
        alive &= guess == tokens[starts + step + 2]
        agreed += alive
        if step + 1 < draft_length:
            h = chains.next(h, guess)
    result: list[int] = agreed[0].tolist()
    return result


def evaluate(
    draft: FeatureHead, corpus: Corpus, sequences: Sequence[CorpusSequence], draft_length: int = 4
) -> Acceptance:
    """Rounds over the answers of ``sequences``, which must be greedy."""
    histogram = [0] * (draft_length + 1)
    for sequence in sequences:
        pairs = agreement(draft, corpus.tokens(sequence), corpus.features(sequence), sequence.prompt - 1, draft_length)
        for accepted in rounds_of(pairs):
            histogram[accepted] += 1
    return Acceptance(draft_length, sum(histogram), tuple(histogram))
