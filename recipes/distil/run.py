"""The stages of a distillation, in order; each picks up where a killed run left it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from recipes.distil import corpus, prompts
from recipes.distil.corpus import Corpus
from recipes.distil.evaluation import Acceptance
from recipes.distil.generation import Generator
from recipes.distil.request import Material, Report, Request
from recipes.distil.schooling import Schooling, prepare
from recipes.distil.target import Target
from recipes.distil.unseen import UNSEEN


def distil(target: Target, request: Request, report: Report) -> Acceptance:
    """Make a draft of ``target`` in ``request.out``; returns what it was measured to do."""
    material = write_corpus(target, request, report)
    return Schooling(material, prepare(material)).run()


def write_corpus(target: Target, request: Request, report: Report) -> Material:
    """Prompts, then the target's answers: the text to train on, and two greedy ones to measure on."""
    request.work.mkdir(parents=True, exist_ok=True)
    plan, layers = request.text, request.layers(target.forward.num_layers)
    context = plan.max_prompt + plan.max_new
    report.stage("prompts", None)
    generator = Generator(target.forward, request.slots, context, target.end_tokens)
    turns = prompts.make(
        request.work / "prompts.jsonl",
        generator,
        target.tokenizer,
        count=request.prompts,
        sampled_share=plan.sampled_share,
        seed=plan.seed,
    )
    report.advance(len(turns), "")
    generator = Generator(target.forward, request.slots, context, target.end_tokens, layers)
    greedy = replace(plan, greedy_share=1.0)
    opened: dict[str, Corpus] = {}
    for name, texts, its_plan in (
        ("train", [turn.text for turn in turns if not turn.held_out], plan),
        ("held", [turn.text for turn in turns if turn.held_out], greedy),
        ("unseen", UNSEEN, greedy),
    ):
        todo = corpus.jobs(texts, target.tokenizer, its_plan)
        report.stage(f"{name} text", len(todo))
        corpus.write(request.work / name, generator, todo, _counting(report))
        opened[name] = Corpus(request.work / name)
    return Material(target, request, layers, opened["train"], opened["held"], opened["unseen"], report)


def _counting(report: Report) -> Callable[[int, int], None]:
    """Progress of written text, with its rate."""
    began, seen = time.monotonic(), 0

    def count(sequences: int, tokens: int) -> None:
        nonlocal seen
        seen += tokens
        report.advance(sequences, f"{seen:,} tokens, {seen / max(1e-3, time.monotonic() - began):,.0f}/s")

    return count
