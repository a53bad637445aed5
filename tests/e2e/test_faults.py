"""Whatever happens to the draft, every stream completes, says why, and a draft that comes back is used again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.v1 import common_pb2

from tests.e2e.prompts import PROMPTS
from tests.stack import Answer, Client, Stack, generate_request, identities_hold, messages, until

TOKENS = 120


@pytest.fixture
def running(own_stack: Stack) -> Iterator[Stack]:
    return own_stack.start()


def expected(client: Client, prompt: str) -> list[int]:
    return client.generate(generate_request(prompt, common_pb2.MODE_STANDARD, TOKENS)).token_ids


def reasons(answer: Answer) -> set[int]:
    return {f.reason for f in answer.tag.fallbacks}


def test_a_draft_killed_in_the_middle_of_a_stream_loses_nothing_and_is_used_again(running: Stack) -> None:
    client = Client(running.gateway_address)
    running.wait_for_draft()
    whole = expected(client, PROMPTS[0])
    answer = Answer()
    stream = messages(client.open(generate_request(PROMPTS[0], common_pb2.MODE_SPECULATIVE, TOKENS)), answer)
    for _ in range(6):
        next(stream)
    running.kill("draft")
    for message in stream:
        del message
    assert answer.token_ids == whole
    assert answer.finished is not None
    identities_hold(answer.finished.usage, answer.tag)
    assert reasons(answer) <= {common_pb2.FALLBACK_REASON_DRAFT_LOST, common_pb2.FALLBACK_REASON_DRAFT_ABSENT}
    assert reasons(answer)
    assert not list(running.shared_memory.iterdir()), "a killed draft left shared memory behind"

    absent = client.generate(generate_request(PROMPTS[0], common_pb2.MODE_SPECULATIVE, TOKENS))
    assert absent.token_ids == whole
    assert absent.tag.mode_reason == "draft absent"
    assert running.metric("target", "slipstream_target_fallbacks_total", reason="draft_absent") > 0

    running.start("draft")  # The socket that the killed draft left behind does not block it.
    running.wait_for_draft()
    back = client.generate(generate_request(PROMPTS[0], common_pb2.MODE_SPECULATIVE, TOKENS))
    assert back.token_ids == whole
    assert back.tag.num_accepted_draft_tokens > 0
    assert not back.tag.fallbacks


def test_a_draft_that_returns_while_a_stream_runs_joins_it(running: Stack) -> None:
    """The answer is long enough for a restart to fit into it; a stream that ends first is asked for again."""
    client = Client(running.gateway_address)
    running.wait_for_draft()
    running.kill("draft")
    running.spawn("draft")

    def joined() -> bool:
        answer = client.generate(generate_request(PROMPTS[0], common_pb2.MODE_SPECULATIVE, 400))
        return bool(answer.tag.fallbacks) and answer.tag.num_spec_steps > 0

    until(joined, "a stream that began without the draft speculates", 60)


def test_a_hung_draft_costs_a_round_not_the_stream(running: Stack) -> None:
    client = Client(running.gateway_address)
    running.wait_for_draft()
    whole = expected(client, PROMPTS[3])
    answer = Answer()
    stream = messages(client.open(generate_request(PROMPTS[3], common_pb2.MODE_SPECULATIVE, TOKENS)), answer)
    for _ in range(4):
        next(stream)
    running.processes["draft"].send_signal(signal.SIGSTOP)
    try:
        for message in stream:
            del message
    finally:
        running.processes["draft"].send_signal(signal.SIGCONT)
    assert answer.token_ids == whole
    assert common_pb2.FALLBACK_REASON_DRAFT_SLOW in reasons(answer)

    def used_again() -> bool:
        again = client.generate(generate_request(PROMPTS[3], common_pb2.MODE_SPECULATIVE, TOKENS))
        assert again.token_ids == whole
        return again.tag.num_accepted_draft_tokens > 0 and not again.tag.fallbacks

    until(used_again, "the draft is used again")


def test_without_a_draft_from_the_start_requests_are_served(own_stack: Stack) -> None:
    own_stack.start("target", "gateway")
    client = Client(own_stack.gateway_address)
    for mode in (common_pb2.MODE_AUTO, common_pb2.MODE_SPECULATIVE):
        answer = client.generate(generate_request(PROMPTS[1], mode, 20))
        assert len(answer.token_ids) > 0
        assert answer.started is not None
        assert answer.started.active_mode == common_pb2.MODE_STANDARD
        assert answer.started.mode_reason == "draft absent"
        assert answer.metadata["slipstream-mode-reason"] == "draft absent"


def test_speculation_switched_off_on_the_server_makes_no_draft_call(own_stack: Stack) -> None:
    own_stack._settings["SLIPSTREAM_TARGET_SPECULATION"] = "off"
    own_stack.start()
    answer = Client(own_stack.gateway_address).generate(generate_request(PROMPTS[1], common_pb2.MODE_SPECULATIVE, 20))
    assert answer.tag.active_mode == common_pb2.MODE_STANDARD
    assert answer.tag.mode_reason == "disabled"
    assert own_stack.metric("draft", "slipstream_draft_rounds_total") == 0


def test_without_shared_memory_tensors_ride_inline_with_the_same_result(running: Stack, own_stack: Stack) -> None:
    sampling = common_pb2.SamplingParams(temperature=0.9, seed=5, verification=common_pb2.VERIFICATION_BLOCK)
    request = generate_request(PROMPTS[2], common_pb2.MODE_SPECULATIVE, TOKENS, sampling=sampling)
    running.wait_for_draft()
    shared = Client(running.gateway_address).generate(request)
    inline_stack = Stack({"SLIPSTREAM_TARGET_SHARED_MEMORY": "/does/not/exist"})
    try:
        inline_stack.start()
        inline_stack.wait_for_draft()
        inline = Client(inline_stack.gateway_address).generate(request)
    finally:
        inline_stack.stop()
    assert inline.token_ids == shared.token_ids
    assert inline.tag.num_accepted_draft_tokens == shared.tag.num_accepted_draft_tokens > 0


def test_killing_both_leaves_no_segment_and_no_socket_that_blocks(running: Stack) -> None:
    client = Client(running.gateway_address)
    running.wait_for_draft()
    call = client.open(generate_request(PROMPTS[0], common_pb2.MODE_SPECULATIVE, 400))
    next(iter(call))
    for name in ("target", "draft"):
        running.kill(name)
    assert not list(running.shared_memory.iterdir())
    running.start("draft", "target")
    running.wait_for_draft()
    until(
        lambda: Client(running.gateway_address).generate(generate_request("Hello", max_tokens=5)).finished,
        "answers again",
    )


def test_a_second_draft_on_the_same_socket_is_refused(running: Stack) -> None:
    first = running.processes["draft"]
    running.spawn("draft")
    assert running.processes["draft"].wait(timeout=60) == 2
    assert "another draft serves this socket" in running.log("draft")
    running.processes["draft"] = first
    assert first.poll() is None


def test_a_target_as_its_own_draft_is_refused_and_said(own_stack: Stack) -> None:
    own_stack._settings["SLIPSTREAM_DRAFT_MODEL"] = str(_default_gguf())
    own_stack.start()
    until(lambda: "loaded as its own draft" in own_stack.log("target"), "the refusal is logged")
    assert own_stack.info().draft_state == common_pb2.FALLBACK_REASON_DRAFT_INVALID
    answer = Client(own_stack.gateway_address).generate(generate_request(PROMPTS[1], max_tokens=10))
    assert answer.tag.mode_reason == "draft invalid"


def _default_gguf() -> Path:
    from services.model.store import prepare

    return next(prepare("default").path.glob("*.gguf"))


def test_the_drafts_socket_folder_is_closed_to_others(running: Stack) -> None:
    assert os.stat(running.socket.parent).st_mode & 0o777 == 0o700
