"""What an internal service meets at the gateway: streams, ends, refusals, records."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.v1 import common_pb2, gateway_pb2, target_pb2, target_pb2_grpc

from tests.e2e.prompts import PROMPTS
from tests.stack import Answer, Client, Stack, chat, generate_request, identities_hold, messages, until


def violations(error: grpc.RpcError | None) -> dict[str, str]:
    """Bad fields and what they may be, from google.rpc.BadRequest."""
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(error)
    bad = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad)
    return {v.field: v.description for v in bad.field_violations}


def test_the_first_message_says_the_mode_and_the_last_carries_usage_and_tag(client: Client) -> None:
    answer = client.generate(generate_request(PROMPTS[0], common_pb2.MODE_SPECULATIVE, request_id="order-1"))
    assert answer.started is not None
    assert answer.finished is not None
    assert answer.started.request_id == answer.metadata["slipstream-request-id"] == "order-1"
    assert answer.started.active_mode == common_pb2.MODE_SPECULATIVE
    assert answer.metadata["slipstream-active-mode"] == "speculative"
    assert answer.finished.usage.completion_tokens == len(answer.token_ids)
    assert answer.trailer["slipstream-finish-reason"] == "length"
    assert common_pb2.Usage.FromString(answer.trailer["slipstream-usage-bin"]) == answer.finished.usage
    assert common_pb2.OptimizationTag.FromString(answer.trailer["slipstream-tag-bin"]) == answer.tag
    assert answer.tag.drafter == "features"
    assert answer.tag.drafter_fingerprint.startswith("sha256:")
    assert answer.tag.time.verify_ms > 0
    assert answer.tag.time.draft_ms > 0


def test_text_and_ids_tell_the_same_answer(client: Client, stack: Stack) -> None:
    from services.model.store import prepare
    from services.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(prepare("default").path)
    for prompt in ("Emoji only: ten different emoji please 🌧️🎉", "请写一句话。", PROMPTS[2]):
        answer = client.generate(generate_request(prompt, max_tokens=60))
        assert "\ufffd" not in answer.text
        assert tokenizer.decode(answer.token_ids).rstrip("\ufffd") == answer.text


def test_prompts_may_be_text_chat_or_ids(client: Client) -> None:
    ids = common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=[504, 260, 314]))
    for prompt in (common_pb2.Prompt(text="The capital of"), chat("Hi"), ids):
        answer = client.generate(generate_request(prompt, max_tokens=5))
        assert answer.error is None
        counted = client.stub.CountTokens(gateway_pb2.CountTokensRequest(prompt=prompt)).prompt_tokens
        assert answer.finished is not None
        assert counted == answer.finished.usage.prompt_tokens


@pytest.mark.parametrize("mode", [common_pb2.MODE_STANDARD, common_pb2.MODE_SPECULATIVE])
def test_stop_strings_never_show_not_even_by_half(client: Client, mode: int) -> None:
    whole = client.generate(generate_request(PROMPTS[0], mode, 60)).text
    for stop in (whole[20:27], whole[33:35], "never said", whole[50:51]):
        conditions = common_pb2.StopConditions(max_tokens=60, stop=[stop])
        answer = Answer()
        for _ in messages(client.open(generate_request(PROMPTS[0], mode, stop=conditions)), answer):
            assert stop not in answer.text
        assert answer.text == whole.split(stop)[0]
        assert answer.finished is not None
        assert answer.finished.usage.completion_tokens == len(answer.token_ids)
        identities_hold(answer.finished.usage, answer.tag)


def test_stop_tokens_and_limits_cut_an_accepted_run_alike_in_both_modes(client: Client) -> None:
    whole = client.generate(generate_request(PROMPTS[10], common_pb2.MODE_STANDARD, 40)).token_ids
    for count in range(1, 12):
        answer = client.generate(generate_request(PROMPTS[10], common_pb2.MODE_SPECULATIVE, count))
        assert answer.token_ids == whole[:count]
    for token in set(whole[:12]):
        conditions = common_pb2.StopConditions(max_tokens=40, stop_token_ids=[token])
        answer = client.generate(generate_request(PROMPTS[10], common_pb2.MODE_SPECULATIVE, stop=conditions))
        assert answer.token_ids == whole[: whole.index(token) + 1]
        assert answer.finished is not None
        assert answer.finished.finish_reason == common_pb2.FINISH_REASON_STOP
        identities_hold(answer.finished.usage, answer.tag)


S, T = common_pb2.SamplingParams, common_pb2.StopConditions
BAD = {
    "sampling.temperature": {"sampling": S(temperature=2.1)},
    "sampling.top_k": {"sampling": S(top_k=-1)},
    "sampling.top_p": {"sampling": S(top_p=0)},
    "sampling.min_p": {"sampling": S(min_p=1.5)},
    "sampling.repetition_penalty": {"sampling": S(repetition_penalty=float("nan"))},
    "sampling.verification": {"sampling": S(verification=99)},
    "stop.max_tokens": {"stop": T(max_tokens=0)},
    "stop.min_tokens": {"stop": T(max_tokens=5, min_tokens=6)},
    "stop.stop[0]": {"stop": T(stop=[""])},
    "stop.stop": {"stop": T(stop=["x"] * 17)},
    "stop.stop_token_ids[0]": {"stop": T(stop_token_ids=[49152])},
    "mode": {"mode": 9},
    "max_draft_length": {"max_draft_length": 17},
    "request_id": {"request_id": "no spaces"},
    "unsupported.logprobs": {"unsupported": common_pb2.UnsupportedOptions(logprobs=3)},
    "unsupported.n": {"unsupported": common_pb2.UnsupportedOptions(n=2)},
    "unsupported.grammar": {"unsupported": common_pb2.UnsupportedOptions(grammar="x")},
    "prompt": {"prompt": common_pb2.Prompt()},
    "prompt.text": {"prompt": common_pb2.Prompt(text="")},
    "prompt.chat.messages": {"prompt": common_pb2.Prompt(chat=common_pb2.ChatPrompt())},
    "prompt.chat.messages[0].role": {
        "prompt": common_pb2.Prompt(
            chat=common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="boss", content="x")])
        )
    },
    "prompt.token_ids.ids[1]": {"prompt": common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=[1, -5]))},
    "prompt.token_ids": {"prompt": common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=[1] * 9000))},
}


@pytest.mark.parametrize("field", BAD)
def test_bad_input_is_refused_by_the_fields_name(client: Client, field: str) -> None:
    fields: dict[str, Any] = {"prompt": "Hi", **BAD[field]}
    answer = client.generate(generate_request(**fields))
    found = violations(answer.error)
    assert field in found
    assert len(found[field]) > 5
    assert answer.trailer["slipstream-finish-reason"] == "error"


def test_several_bad_fields_are_named_at_once(client: Client) -> None:
    answer = client.generate(generate_request("Hi", sampling=S(top_k=-1, min_p=-1), stop=T(min_tokens=-1)))
    assert {"sampling.top_k", "sampling.min_p", "stop.min_tokens"} <= set(violations(answer.error))


def test_a_request_that_is_too_large_is_refused_before_it_is_read(client: Client) -> None:
    answer = client.generate(generate_request("x " * 2_500_000))
    assert "bytes" in violations(answer.error)["prompt"]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(text=st.text(min_size=1, max_size=60))
def test_any_unicode_is_answered_in_whole_characters(stack: Stack, text: str) -> None:
    client = Client(stack.gateway_address)
    answer = client.generate(generate_request(common_pb2.Prompt(text=text), max_tokens=8))
    assert answer.error is None
    answer.text.encode()
    client.close()


def test_a_cancelled_stream_frees_its_place_and_leaves_a_record(client: Client, stack: Stack) -> None:
    free = stack.info().free_cache_tokens
    answer = Answer()
    call = client.open(generate_request(PROMPTS[0], max_tokens=2000, request_id="cancelled-1"))
    stream = messages(call, answer)
    for _ in range(8):
        next(stream)
    call.cancel()
    until(lambda: stack.info().free_cache_tokens == free, "the target's cache is free again", 10)
    record = until(lambda: stack.log_lines("gateway", event="usage", request_id="cancelled-1"), "a usage record")[0]
    assert record["finish_reason"] == "cancelled"
    assert record["completion_tokens"] >= len(answer.token_ids) > 0
    assert sum(record["tag"]["tokens_by_origin"].values()) == record["completion_tokens"]
    assert sum(record["tag"]["acceptance_histogram"]) == record["tag"]["num_spec_steps"]


def test_a_deadline_ends_the_stream_with_its_own_status_and_a_record(client: Client, stack: Stack) -> None:
    free = stack.info().free_cache_tokens
    answer = client.generate(generate_request(PROMPTS[0], max_tokens=4000, request_id="late-1"), timeout=0.4)
    assert answer.error is not None
    assert answer.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert answer.token_ids
    until(lambda: stack.info().free_cache_tokens == free, "the target's cache is free again", 10)
    record = until(lambda: stack.log_lines("gateway", event="usage", request_id="late-1"), "a usage record")[0]
    assert record["finish_reason"] == "deadline"
    assert record["completion_tokens"] >= len(answer.token_ids)


def test_records_hold_no_text(client: Client, stack: Stack) -> None:
    secret = "zebra-quartz-7731"
    client.generate(generate_request(f"Repeat after me: {secret}", request_id="secret-1"))
    until(lambda: stack.log_lines("gateway", event="usage", request_id="secret-1"), "a usage record")
    for name in ("gateway", "target", "draft"):
        assert secret not in stack.log(name)


def test_every_process_logs_the_requests_id(client: Client, stack: Stack) -> None:
    client.generate(generate_request(PROMPTS[4], common_pb2.MODE_SPECULATIVE, request_id="traced-1"))
    for name in ("gateway", "target", "draft"):
        until(lambda name=name: stack.log_lines(name, request_id="traced-1"), f"{name} logs the id")


def test_the_sum_of_all_tags_equals_the_counters(client: Client, stack: Stack) -> None:
    names = ("spec_steps", "draft_tokens", "accepted_draft_tokens")

    def counters() -> dict[str, float]:
        found = {n: stack.metric("gateway", f"slipstream_gateway_{n}_total") for n in names}
        for origin in ("accepted", "correction", "bonus", "standard"):
            found[origin] = stack.metric("gateway", "slipstream_gateway_tokens_total", origin=origin)
        found["prompt"] = stack.metric("gateway", "slipstream_gateway_prompt_tokens_total")
        return found

    before = counters()
    total = dict.fromkeys(before, 0.0)
    for i, prompt in enumerate(PROMPTS[:8]):
        mode = (common_pb2.MODE_STANDARD, common_pb2.MODE_SPECULATIVE)[i % 2]
        answer = client.generate(generate_request(prompt, mode, 10 + i))
        assert answer.finished is not None
        total["spec_steps"] += answer.tag.num_spec_steps
        total["draft_tokens"] += answer.tag.num_draft_tokens
        total["accepted_draft_tokens"] += answer.tag.num_accepted_draft_tokens
        total["prompt"] += answer.finished.usage.prompt_tokens
        for origin in ("accepted", "correction", "bonus", "standard"):
            total[origin] += getattr(answer.tag.tokens_by_origin, origin)
    assert until(lambda: {k: v - before[k] for k, v in counters().items()} == total, "counters equal the tags", 5)


def test_info_tells_both_models(client: Client) -> None:
    info = client.stub.GetInfo(gateway_pb2.GatewayServiceGetInfoRequest())
    assert info.model.model_id == "SmolLM2-135M-Instruct"
    assert info.model.tokenizer_fingerprint == info.draft.tokenizer_fingerprint
    assert info.drafter == "features"
    assert info.draft_state == common_pb2.FALLBACK_REASON_UNSPECIFIED


@pytest.mark.parametrize(
    ("name", "service"), [("gateway", "GatewayService"), ("target", "TargetService"), ("draft", "DraftService")]
)
def test_each_server_has_health_and_reflection(stack: Stack, name: str, service: str) -> None:
    with grpc.insecure_channel(stack.address(name)) as channel:
        full = f"slipstream.v1.{service}"
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=full))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answer = next(iter(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked)))
        assert full in [s.name for s in answer.list_services_response.service]


@pytest.fixture
def small(own_stack: Stack) -> Iterator[Stack]:
    own_stack._settings |= {"SLIPSTREAM_GATEWAY_MAX_RUNNING": "1", "SLIPSTREAM_GATEWAY_MAX_WAITING": "1"}
    return own_stack.start("target", "gateway")


def test_beyond_the_queue_requests_are_refused_with_a_hint(small: Stack) -> None:
    client = Client(small.gateway_address)
    running = client.open(generate_request(PROMPTS[0], max_tokens=3000))
    next(iter(running))
    waiting = client.open(generate_request(PROMPTS[0], max_tokens=5))
    until(lambda: small.metric("gateway", "slipstream_gateway_waiting_requests") == 1, "one request waits")
    refused = client.generate(generate_request(PROMPTS[0], max_tokens=5))
    assert refused.error is not None
    assert refused.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(refused.error)
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.seconds >= 1
    running.cancel()
    assert list(waiting)[-1].finished.usage.completion_tokens == 5


def test_drain_lets_open_streams_end_and_takes_no_new_ones(small: Stack) -> None:
    client = Client(small.gateway_address)
    answer = Answer()
    stream = messages(client.open(generate_request(PROMPTS[0], max_tokens=300)), answer)
    next(stream)
    small.processes["gateway"].send_signal(signal.SIGTERM)
    until(lambda: "draining" in small.log("gateway"), "the gateway drains")
    late = Client(small.gateway_address).generate(generate_request("Hi", max_tokens=5), timeout=10)
    assert late.error is not None
    assert late.error.code() is grpc.StatusCode.UNAVAILABLE
    for message in stream:
        del message
    assert answer.finished is not None
    assert small.processes["gateway"].wait(timeout=30) == 0


def test_health_follows_the_target(small: Stack) -> None:
    from services.serving.probe import is_serving

    small.kill("target")
    until(lambda: not is_serving(small.gateway_address), "the gateway says that it does not serve")
    dead = Client(small.gateway_address).generate(generate_request("Hi"), timeout=20)
    assert dead.error is not None
    assert dead.error.code() is grpc.StatusCode.UNAVAILABLE
    small.start("target")
    until(lambda: is_serving(small.gateway_address), "the gateway serves again")


def test_a_target_killed_in_the_middle_is_an_error_with_a_record(small: Stack) -> None:
    client = Client(small.gateway_address)
    answer = Answer()
    stream = messages(client.open(generate_request(PROMPTS[0], max_tokens=3000, request_id="broken-1")), answer)
    for _ in range(5):
        next(stream)
    small.kill("target")
    with pytest.raises(grpc.RpcError) as caught:
        for message in stream:
            del message
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    record = until(lambda: small.log_lines("gateway", event="usage", request_id="broken-1"), "a usage record")[0]
    assert record["finish_reason"] == "error"
    assert record["completion_tokens"] == len(answer.token_ids)


def test_concurrent_callers_each_get_their_own_answer(client: Client, stack: Stack) -> None:
    expected = client.generate(generate_request(PROMPTS[5], common_pb2.MODE_STANDARD, 30)).token_ids
    answers: list[list[int]] = []

    def call() -> None:
        own = Client(stack.gateway_address)
        answers.append(own.generate(generate_request(PROMPTS[5], common_pb2.MODE_AUTO, 30)).token_ids)
        own.close()

    threads = [threading.Thread(target=call) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 24


def test_verify_judges_a_callers_own_guesses(stack: Stack, client: Client) -> None:
    """TargetService.Verify: open, propose until closed; a stale base is refused by name."""
    whole = client.generate(generate_request(PROMPTS[0], common_pb2.MODE_STANDARD, 12)).token_ids
    prompt = chat(PROMPTS[0])
    with grpc.insecure_channel(stack.target_address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        results: list[Any] = []

        def requests() -> Iterator[target_pb2.VerifyRequest]:
            yield target_pb2.VerifyRequest(open=target_pb2.VerifyOpen(prompt=prompt))
            until(lambda: len(results) == 1, "opened")
            length = results[0].opened.committed_length
            guess = [whole[1], whole[2], whole[3] + 1]
            yield target_pb2.VerifyRequest(propose=target_pb2.VerifyPropose(tokens=guess, base_length=length))
            until(lambda: len(results) == 2, "judged")
            yield target_pb2.VerifyRequest(propose=target_pb2.VerifyPropose(tokens=[whole[4]], base_length=length))

        with pytest.raises(grpc.RpcError) as caught:
            for response in stub.Verify(requests()):
                results.append(response)
    assert results[0].opened.token_id == whole[0]
    assert (results[1].result.accepted, results[1].result.token_id) == (2, whole[3])
    assert results[1].result.origin == target_pb2.TOKEN_ORIGIN_CORRECTION
    assert "stale" in violations(caught.value)["propose.base_length"]


def test_the_command_line_prints_one_json_object(stack: Stack) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "generate", "Say hello", "--max-tokens", "12", "--temperature", "0",
         "--mode", "speculative", "--json", "--address", stack.gateway_address],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert list(answer) == ["text", "token_ids", "finish_reason", "usage", "tag"]
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
    assert answer["tag"]["requested_mode"] == "speculative"
    for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram",
                 "mean_acceptance_length", "draft_acceptance_rate", "tokens_by_origin", "fallbacks"):  # fmt: skip
        assert name in answer["tag"]


def test_the_command_line_tells_bad_input_from_failure(stack: Stack) -> None:
    import subprocess
    import sys

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli.main", "generate", "Hi", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    bad = run("--temperature", "9", "--address", stack.gateway_address)
    assert bad.returncode == 2
    assert "sampling.temperature" in bad.stderr
    unreachable = run("--address", "127.0.0.1:1")
    assert unreachable.returncode == 1
    assert "no gateway answers" in unreachable.stderr
