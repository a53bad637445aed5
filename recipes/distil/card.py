"""The card beside the weights: what the draft is, what it was made from, and what it was measured to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from recipes.distil.corpus import Corpus, CorpusPlan
from recipes.distil.evaluation import Acceptance
from recipes.distil.target import Origin
from recipes.distil.training import TrainingPlan
from services.draft.feature_head import FeatureHead

WEIGHTS_FILE = "draft.safetensors"
CARD_FILE = "card.json"
KIND = "feature_head"


def data_description(corpus: Corpus, plan: CorpusPlan, coverage: float) -> dict[str, Any]:
    """What the draft was trained on."""
    return {
        "text": "answers of the target to user turns sampled from the target itself or made by a seeded grammar; "
        "held-out prompts (by hash of their text) are never trained on",
        "sequences": len(corpus.sequences),
        "tokens": corpus.num_tokens,
        "sha256_of_tokens": corpus.fingerprint(),
        "vocabulary_coverage": round(coverage, 5),
        "plan": asdict(plan),
    }


def measured(acceptance: Acceptance, prompts: int, how: str) -> dict[str, Any]:
    """Acceptance as the card tells it; ``how`` says what it was measured on."""
    return {
        "how": f"greedy chains against the target's greedy answers to {how}",
        "prompts": prompts,
        "draft_length": acceptance.draft_length,
        "rounds": acceptance.rounds,
        "acceptance_histogram": list(acceptance.histogram),
        "acceptance_by_position": [round(share, 4) for share in acceptance.by_position],
        "mean_acceptance_length": round(acceptance.mean_acceptance_length, 4),
    }


def versions() -> dict[str, str]:
    """Versions of what computes."""
    return {name: version(name) for name in ("torch", "safetensors", "tokenizers", "numpy")}


def export(
    folder: Path,
    draft: FeatureHead,
    origin: Origin,
    *,
    plan: TrainingPlan,
    steps: int,
    training_seconds: float,
    data: Mapping[str, Any],
    unseen: Mapping[str, Any],
    held_out: Mapping[str, Any],
) -> None:
    """Write weights, then card, each whole and renamed into place: a card never lies beside half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / (WEIGHTS_FILE + ".partial")
    save_file(draft.own_state(), weights)
    weights.chmod(0o644)  # safetensors makes it private, which a service under another user could not read
    weights.replace(folder / WEIGHTS_FILE)
    card = {
        "kind": KIND,
        "target": asdict(origin),
        "config": asdict(draft.config),
        "feature_layers": list(draft.config.feature_layers),
        "parameters": sum(p.numel() for p in draft.parameters()),
        "seed": plan.seed,
        "training": {**asdict(plan), "steps_done": steps, "seconds": round(training_seconds)},
        "data": dict(data),
        "measured": dict(unseen),
        "measured_held_out": dict(held_out),
        "versions": versions(),
    }
    partial = folder / (CARD_FILE + ".partial")
    partial.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / CARD_FILE)


def read_card(folder: Path) -> dict[str, Any]:
    """The card of an exported draft.

    Raises FileNotFoundError where there is none.
    """
    card: dict[str, Any] = json.loads((folder / CARD_FILE).read_text(encoding="utf-8"))
    return card


def load_draft(folder: Path, embed: torch.Tensor, head: torch.Tensor) -> FeatureHead:
    """An exported draft on its target's ``embed`` and ``head`` [V, D].

    Raises FileNotFoundError where a file is missing, ValueError or RuntimeError where weights and target don't fit.
    """
    from safetensors.torch import load_file

    from services.draft.feature_head import FeatureHeadConfig

    config = read_card(folder)["config"]
    config["feature_layers"] = tuple(config["feature_layers"])
    state = load_file(folder / WEIGHTS_FILE)
    vocabulary = state["vocabulary"]
    draft = FeatureHead(FeatureHeadConfig(**config), embed, head[vocabulary.long()].contiguous(), vocabulary)
    draft.load_state_dict(state)
    return draft
