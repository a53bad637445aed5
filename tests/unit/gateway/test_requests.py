"""Bad input is refused by the field's name and its range; gateway and target, which both check, refuse alike."""

from __future__ import annotations

from typing import Any

import pytest
from slipstream.v1 import common_pb2, gateway_pb2, target_pb2

from gateway.requests import MAX_VIOLATIONS, accepted_id, check_size, to_target
from services.model.sampling import Verification
from services.serving.errors import InvalidRequest
from services.target.requests import Limits, RequestReader

S, T = common_pb2.SamplingParams, common_pb2.StopConditions
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "sampling.temperature": ("[0, 2]", {"sampling": S(temperature=float("inf"))}),
    "sampling.top_k": ("[0, 2^31)", {"sampling": S(top_k=-1)}),
    "sampling.top_p": ("(0, 1]", {"sampling": S(top_p=0)}),
    "sampling.min_p": ("[0, 1]", {"sampling": S(min_p=-0.1)}),
    "sampling.repetition_penalty": ("(0, 10]", {"sampling": S(repetition_penalty=float("nan"))}),
    "sampling.verification": ("VERIFICATION_COUPLED", {"sampling": S(verification=9)}),
    "stop.max_tokens": ("[1, ", {"stop": T(max_tokens=0)}),
    "stop.min_tokens": ("[0, max_tokens]", {"stop": T(max_tokens=3, min_tokens=4)}),
    "stop.stop": ("16", {"stop": T(stop=["x"] * 17)}),
    "stop.stop[1]": ("1 to 256", {"stop": T(stop=["x", "y" * 257])}),
    "stop.stop_token_ids": ("64", {"stop": T(stop_token_ids=[1] * 65)}),
    "stop.stop_token_ids[1]": ("", {"stop": T(stop_token_ids=[1, -1])}),
    "mode": ("MODE_AUTO", {"mode": 9}),
    "max_draft_length": ("[0, 16]", {"max_draft_length": 17}),
    "prompt": ("must be set", {"prompt": common_pb2.Prompt()}),
    "prompt.text": ("", {"prompt": common_pb2.Prompt(text="")}),
    "prompt.chat.messages": ("", {"prompt": common_pb2.Prompt(chat=common_pb2.ChatPrompt())}),
    "prompt.chat.messages[0].role": (
        '"assistant"',
        {"prompt": common_pb2.Prompt(chat=common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="boss")]))},
    ),
    "prompt.token_ids": ("", {"prompt": common_pb2.Prompt(token_ids=common_pb2.TokenIds())}),
    "prompt.token_ids.ids[1]": ("", {"prompt": common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=[1, -2]))}),
    "unsupported.logprobs": ("not supported", {"unsupported": common_pb2.UnsupportedOptions(logprobs=0)}),
    "unsupported.n": ("not supported", {"unsupported": common_pb2.UnsupportedOptions(n=2)}),
    "unsupported.grammar": ("not supported", {"unsupported": common_pb2.UnsupportedOptions(grammar="")}),
}


def fields(**given: Any) -> dict[str, Any]:
    return {"prompt": common_pb2.Prompt(text="Hi"), **given}


class Letters:
    """A tokenizer: a token a character."""

    eos_token_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 64 for c in text]

    def encode_chat(self, turns: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(turn["content"] for turn in turns))


def refusal_by_gateway(**given: Any) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        to_target(gateway_pb2.GatewayServiceGenerateRequest(**given), "r")
    return {v.field: v.description for v in caught.value.violations}


def refusal_by_target(**given: Any) -> dict[str, str]:
    reader = RequestReader(Letters(), Limits(64, 512, Verification.BLOCK), 4)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        reader.generate(target_pb2.TargetServiceGenerateRequest(**given))
    return {v.field: v.description for v in caught.value.violations}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_field_is_named_with_its_range(field: str) -> None:
    allowed, given = BAD[field]
    found = refusal_by_gateway(**fields(**given))
    assert list(found) == [field]
    assert allowed in found[field]


@pytest.mark.parametrize("field", BAD)
def test_the_target_refuses_what_the_gateway_refuses(field: str) -> None:
    assert field in refusal_by_target(**fields(**BAD[field][1]))


def test_all_bad_fields_are_named_at_once() -> None:
    found = refusal_by_gateway(**fields(sampling=S(top_k=-1, top_p=2), stop=T(max_tokens=-1), mode=9))
    assert set(found) == {"mode", "sampling.top_k", "sampling.top_p", "stop.max_tokens"}


def test_a_refusal_names_so_many_fields_as_metadata_can_carry() -> None:
    turns = [common_pb2.ChatMessage(role="boss")] * 1000
    assert (
        len(refusal_by_gateway(prompt=common_pb2.Prompt(chat=common_pb2.ChatPrompt(messages=turns)))) == MAX_VIOLATIONS
    )


def test_the_edges_of_every_range_are_taken() -> None:
    for sampling in (
        S(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=10, seed=0),
        S(temperature=2, top_k=2**31 - 1, top_p=1e-6, min_p=1, repetition_penalty=1e-3, seed=2**64 - 1),
    ):
        stop = T(max_tokens=1, min_tokens=1, stop=["y" * 256] * 16, stop_token_ids=[0] * 64)
        message = gateway_pb2.GatewayServiceGenerateRequest(
            **fields(sampling=sampling, stop=stop, max_draft_length=16, unsupported=common_pb2.UnsupportedOptions(n=1))
        )
        sent = to_target(message, "r")
        assert (sent.sampling, sent.stop, sent.mode) == (sampling, stop, common_pb2.MODE_AUTO)


def test_what_is_left_unset_stays_unset_for_the_target_to_decide() -> None:
    sent = to_target(gateway_pb2.GatewayServiceGenerateRequest(**fields()), "r")
    assert sent.sampling == S()
    assert sent.stop == T()


def test_a_request_over_the_size_limit_is_told_both_sizes() -> None:
    message = gateway_pb2.CountTokensRequest(prompt=common_pb2.Prompt(text="x" * 2000))
    check_size(message, 3000)
    with pytest.raises(InvalidRequest, match=r"20\d\d bytes, at most 1000"):
        check_size(message, 1000)


@pytest.mark.parametrize("asked", ["", "two words", "x" * 129, "new\nline", "ünï"])
def test_an_id_that_is_none_is_replaced_in_what_is_logged(asked: str) -> None:
    assert accepted_id(asked) != asked
    assert len(accepted_id(asked)) == 32


def test_a_good_id_is_kept() -> None:
    assert accepted_id("Tenant-1.job:7_a") == "Tenant-1.job:7_a"
