"""Speculation changes no answer: token for token at temperature 0, and for a seed with coupled verification."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from slipstream.v1 import common_pb2

from tests.e2e.prompts import PROMPTS
from tests.stack import Client, generate_request, identities_hold

TOKENS = 48


def test_48_prompts_answer_the_same_in_standard_and_speculative_mode(client: Client) -> None:
    """One at a time in standard mode, eight at a time in speculative mode: neighbours and guesses change nothing."""
    standard = [client.generate(generate_request(p, common_pb2.MODE_STANDARD, TOKENS)) for p in PROMPTS]
    with ThreadPoolExecutor(8) as pool:
        speculative = list(
            pool.map(lambda p: client.generate(generate_request(p, common_pb2.MODE_SPECULATIVE, TOKENS)), PROMPTS)
        )
    assert len(PROMPTS) == 48
    for prompt, a, b in zip(PROMPTS, standard, speculative, strict=True):
        assert a.token_ids == b.token_ids, prompt
        assert a.text == b.text
        assert a.finished is not None
        assert b.finished is not None
        assert a.finished.finish_reason == b.finished.finish_reason
        for answer in (a, b):
            assert answer.finished is not None
            identities_hold(answer.finished.usage, answer.tag)
        assert a.tag.num_spec_steps == 0
    accepted = sum(b.tag.num_accepted_draft_tokens for b in speculative)
    assert accepted > 0.2 * sum(len(b.token_ids) for b in speculative)


@pytest.mark.parametrize("temperature", [0.7, 1.2])
def test_a_seed_repeats_a_coupled_answer_in_either_mode(client: Client, temperature: float) -> None:
    sampling = common_pb2.SamplingParams(
        temperature=temperature,
        top_p=0.95,
        seed=42,
        verification=common_pb2.VERIFICATION_COUPLED,
        repetition_penalty=1.1,
    )
    answers = [
        client.generate(generate_request(PROMPTS[6], mode, TOKENS, sampling=sampling))
        for mode in (common_pb2.MODE_STANDARD, common_pb2.MODE_SPECULATIVE, common_pb2.MODE_SPECULATIVE)
    ]
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert answers[1].tag.num_spec_steps > 0


@pytest.mark.parametrize("verification", [common_pb2.VERIFICATION_TOKEN, common_pb2.VERIFICATION_BLOCK])
def test_a_seed_repeats_an_answer_in_the_same_mode(client: Client, verification: common_pb2.Verification) -> None:
    sampling = common_pb2.SamplingParams(temperature=0.8, seed=7, verification=verification)
    answers = [
        client.generate(generate_request(PROMPTS[3], common_pb2.MODE_SPECULATIVE, TOKENS, sampling=sampling))
        for _ in range(2)
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].tag.num_accepted_draft_tokens > 0


def test_penalties_mean_the_same_with_speculation_on(client: Client) -> None:
    sampling = common_pb2.SamplingParams(repetition_penalty=1.3)
    a, b = (
        client.generate(generate_request(PROMPTS[17], mode, TOKENS, sampling=sampling))
        for mode in (common_pb2.MODE_STANDARD, common_pb2.MODE_SPECULATIVE)
    )
    assert a.token_ids == b.token_ids
    assert b.tag.num_spec_steps > 0
