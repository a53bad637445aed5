"""Rows in, logits out: what was scheduled and proposed, as one pass of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.model.forward import ForwardPass, SequenceRows
from services.target.scheduler import Scheduled
from services.target.verification import Proposal


@dataclass(frozen=True, slots=True)
class Result:
    """What a pass gave one sequence."""

    item: Scheduled
    proposal: Proposal
    logits: torch.Tensor | None
    """[guesses + 1, vocabulary]; None while a prompt is not through."""
    features: torch.Tensor | None
    """[rows, layers, hidden] bfloat16; None if none were wanted."""


class ModelRunner:
    """Turns sequences into rows of the pass."""

    def __init__(self, forward_pass: ForwardPass) -> None:
        self._pass = forward_pass

    def run(
        self, scheduled: Sequence[Scheduled], proposals: Mapping[int, Proposal], feature_layers: Sequence[int]
    ) -> list[Result]:
        """One pass over the waiting rows of all sequences, each followed by its guesses."""
        nothing = Proposal(())
        chosen = [proposals.get(item.sequence.id, nothing) if item.reaches_end else nothing for item in scheduled]
        batch = [_rows(item, proposal) for item, proposal in zip(scheduled, chosen, strict=True)]
        output = self._pass.run(batch, feature_layers)
        results = []
        row = wanted = 0
        for item, proposal, rows in zip(scheduled, chosen, batch, strict=True):
            features = None if output.features is None else output.features[row : row + len(rows.tokens)]
            logits = output.logits[wanted : wanted + rows.logits] if rows.logits else None
            results.append(Result(item, proposal, logits, features))
            row += len(rows.tokens)
            wanted += rows.logits
        return results


def _rows(item: Scheduled, proposal: Proposal) -> SequenceRows:
    sequence = item.sequence
    waiting = sequence.committed[sequence.cached : sequence.cached + item.rows]
    return SequenceRows(
        tokens=[*waiting, *proposal.tokens],
        base=sequence.cached,
        blocks=sequence.blocks,
        logits=1 + len(proposal.tokens) if item.reaches_end else 0,
    )
