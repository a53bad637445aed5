"""What the gateway promises its callers, whatever the target behind it does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from prometheus_client import REGISTRY
from slipstream.v1 import common_pb2, gateway_pb2, target_pb2

from services.serving.errors import FieldViolation, InvalidRequest, abort
from tests.contract.targets import Context, FakeTarget, Front, Reply, chunk, eventually, finished, front, started
from tests.stack import generate_request, identities_hold

GENEROUS_S = 20


@pytest.fixture
async def house() -> AsyncIterator[Front]:
    async with front() as built:
        yield built


@pytest.fixture(autouse=True)
def log() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def records(log: list[Any]) -> list[Any]:
    return [line for line in log if line["event"] == "usage"]


async def fails(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return caught.value


async def rest(call: Any) -> list[Any]:
    """The messages that are still to come."""
    found = []
    while (message := await call.read()) is not grpc.aio.EOF:
        found.append(message)
    return found


def ask(house: Front, text: str = "Hi", timeout: float = GENEROUS_S, **fields: Any) -> Any:
    return house.stub.Generate(generate_request(text, **fields), timeout=timeout)


def hang(first: int = 1) -> Any:
    """A target that starts, sends some tokens, and then says nothing more."""

    async def script(request: target_pb2.TargetServiceGenerateRequest, context: Context) -> AsyncIterator[Reply]:
        yield started()
        for _ in range(first):
            yield chunk(3, 4, 2)
        await asyncio.Event().wait()

    return script


def plays(*replies: Reply) -> Any:
    async def script(request: target_pb2.TargetServiceGenerateRequest, context: Context) -> AsyncIterator[Reply]:
        for reply in replies:
            yield reply

    return script


# The stream


async def test_a_stream_is_started_then_chunks_then_finished_and_metadata_says_the_same(house: Front) -> None:
    call = ask(house, request_id="r-1")
    kinds = [message.WhichOneof("message") for message in await rest(call)]
    assert kinds == ["started", "chunk", "finished"]
    header, trailer = dict(await call.initial_metadata()), dict(await call.trailing_metadata())
    assert header["slipstream-request-id"] == "r-1"
    assert header["slipstream-active-mode"] == "speculative"
    assert trailer["slipstream-finish-reason"] == "stop"
    usage = common_pb2.Usage.FromString(trailer["slipstream-usage-bin"])
    identities_hold(usage, common_pb2.OptimizationTag.FromString(trailer["slipstream-tag-bin"]))


async def test_the_header_comes_before_the_first_token(house: Front) -> None:
    house.target.script = hang(0)
    call = ask(house)
    assert (await call.read()).started.prompt_tokens == 7
    assert dict(await call.initial_metadata())["slipstream-active-mode"] == "speculative"
    call.cancel()


async def test_a_mode_reason_that_metadata_cannot_carry_reaches_the_message_whole(house: Front) -> None:
    house.target.script = plays(started(common_pb2.MODE_STANDARD, "draft weg — später\n"), finished(tokens=0))
    call = ask(house)
    assert (await call.read()).started.mode_reason == "draft weg — später\n"
    assert dict(await call.initial_metadata())["slipstream-mode-reason"] == "draft weg ? sp?ter?"


async def test_the_request_reaches_the_target_whole_with_its_id_and_deadline(house: Front) -> None:
    sampling = common_pb2.SamplingParams(temperature=0.5, seed=2**64 - 1, min_p=0.1)
    call = ask(house, request_id="r-2", sampling=sampling, mode=common_pb2.MODE_STANDARD, max_draft_length=3, timeout=9)
    await rest(call)
    sent, target = house.target.requests[0], house.target
    assert (sent.request_id, sent.mode, sent.max_draft_length) == ("r-2", common_pb2.MODE_STANDARD, 3)
    assert sent.sampling == sampling
    assert target.metadata[0]["x-request-id"] == "r-2"
    left = target.time_left[0]
    assert left is not None
    assert 0 < left < 9.5


async def test_a_request_without_a_deadline_gets_the_servers() -> None:
    async with front(max_seconds=0.3) as house:
        house.target.script = hang()
        error = await fails(house.stub.Generate(generate_request("Hi")))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: house.target.live == 0)


async def test_a_caller_without_an_id_is_told_the_one_it_got(house: Front) -> None:
    call = ask(house)
    first = await call.read()
    assert first.started.request_id == house.target.requests[0].request_id
    assert len(first.started.request_id) == 32


# Ends


async def test_cancelling_ends_the_targets_call_at_once_and_leaves_a_record(house: Front, log: list[Any]) -> None:
    house.target.script = hang(2)
    call = ask(house, request_id="gone")
    for _ in range(3):
        await call.read()
    call.cancel()
    await asyncio.wait_for(house.target.ended.wait(), GENEROUS_S)
    await eventually(lambda: records(log))
    (record,) = records(log)
    assert (record["request_id"], record["finish_reason"], record["status"]) == ("gone", "cancelled", "CANCELLED")
    assert (record["prompt_tokens"], record["completion_tokens"]) == (7, 6)
    assert record["tag"]["acceptance_histogram"] == [0, 0, 2]
    assert record["tag"]["tokens_by_origin"] == {"accepted": 4, "correction": 2}
    assert house.admission.running == 0


async def floods(request: target_pb2.TargetServiceGenerateRequest, context: Context) -> AsyncIterator[Reply]:
    """More text than the windows between target, gateway and a caller that does not read can hold."""
    yield started()
    while True:
        yield chunk(text="x" * 100_000)


async def test_cancelling_while_a_slow_reader_holds_the_stream_up_counts_as_cancelled(
    house: Front, log: list[Any]
) -> None:
    house.target.script = floods
    call = ask(house)
    await call.read()
    await asyncio.sleep(0.2)  # The windows fill: the gateway now waits in a write.
    call.cancel()
    await eventually(lambda: records(log) and house.target.live == 0)
    assert records(log)[0]["finish_reason"] == "cancelled"
    assert house.admission.running == 0


async def test_a_reader_that_never_reads_loses_its_place_when_its_time_is_up(log: list[Any]) -> None:
    async with front(max_seconds=0.5) as house:
        house.target.script = floods
        call = house.stub.Generate(generate_request("Hi"))
        await call.read()
        await eventually(lambda: records(log) and house.target.live == 0)
        assert records(log)[0]["finish_reason"] == "deadline"
        assert house.admission.running == 0
        call.cancel()


async def test_a_deadline_reaches_the_target_and_the_record(house: Front, log: list[Any]) -> None:
    house.target.script = hang()
    error = await fails(ask(house, timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: records(log) and house.target.live == 0)
    assert records(log)[0]["finish_reason"] == "deadline"
    assert records(log)[0]["completion_tokens"] == 3


async def test_a_target_that_dies_mid_stream_leaves_status_tag_and_record(house: Front, log: list[Any]) -> None:
    house.target.script = hang(2)
    call = ask(house)
    for _ in range(3):
        await call.read()
    await house.target_server.stop(None)
    error = await fails(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    trailer = dict(error.trailing_metadata())
    assert trailer["slipstream-finish-reason"] == "error"
    usage = common_pb2.Usage.FromString(trailer["slipstream-usage-bin"])
    assert usage.completion_tokens == 6
    identities_hold(usage, common_pb2.OptimizationTag.FromString(trailer["slipstream-tag-bin"]))
    assert records(log)[0]["finish_reason"] == "error"


BROKEN = {
    "nothing at all": (),
    "no end": (started(), chunk()),
    "tokens before the start": (chunk(), started(), finished()),
    "an end without a start": (finished(),),
    "two starts": (started(), started()),
    "tokens after the end": (started(), finished(), chunk()),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_target_that_breaks_the_order_is_an_error_never_a_silent_end(
    house: Front, log: list[Any], case: str
) -> None:
    house.target.script = plays(*BROKEN[case])
    error = await fails(ask(house))
    assert error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    await eventually(lambda: records(log) and house.admission.running == 0)
    assert records(log)[0]["status"] == error.code().name


async def test_a_kind_of_message_that_only_a_newer_target_knows_is_passed_over(house: Front) -> None:
    house.target.script = plays(Reply(), started(), Reply(), chunk(), finished())
    assert len(await rest(ask(house))) == 3


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (common_pb2.FINISH_REASON_DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
        (common_pb2.FINISH_REASON_CANCELLED, grpc.StatusCode.UNAVAILABLE),
        (common_pb2.FINISH_REASON_ERROR, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_an_answer_that_the_target_gave_up_is_never_a_success(
    house: Front, reason: int, code: grpc.StatusCode
) -> None:
    house.target.script = plays(started(), chunk(), finished(reason))
    assert (await fails(ask(house))).code() is code


async def test_no_internal_text_of_the_target_reaches_the_caller(house: Front) -> None:
    async def leaks(request: target_pb2.TargetServiceGenerateRequest, context: Context) -> AsyncIterator[Reply]:
        yield started()
        raise RuntimeError("/secret/path at 0xdeadbeef")

    house.target.script = leaks
    error = await fails(ask(house))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in f"{error.details()} {error.trailing_metadata()}"


async def test_a_request_that_the_target_cannot_do_names_the_field(house: Front) -> None:
    async def refuses(request: target_pb2.TargetServiceGenerateRequest, context: Context) -> AsyncIterator[Reply]:
        await abort(context, InvalidRequest.of([FieldViolation("stop.max_tokens", "in [1, 100]")]))
        yield started()

    house.target.script = refuses
    error = await fails(ask(house))
    bad = error_details_pb2.BadRequest()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc_status.from_call(error).details[0].Unpack(bad)
    assert [(v.field, v.description) for v in bad.field_violations] == [("stop.max_tokens", "in [1, 100]")]


async def test_a_target_that_is_down_is_unavailable_with_a_hint_when_to_retry(house: Front) -> None:
    await house.target_server.stop(None)
    error = await fails(ask(house))
    retry = error_details_pb2.RetryInfo()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert rpc_status.from_call(error).details[0].Unpack(retry)


# The queue


async def test_a_cancelled_waiter_never_reaches_the_target_and_the_next_one_does() -> None:
    async with front(max_running=1, max_waiting=2) as house:
        house.target.script = hang()
        running = ask(house)
        await running.read()
        waiting, next_one = ask(house, request_id="waits"), ask(house, request_id="next")
        await eventually(lambda: house.admission.waiting == 2)
        waiting.cancel()
        await eventually(lambda: house.admission.waiting == 1)
        running.cancel()
        await next_one.read()
        assert [r.request_id for r in house.target.requests[1:]] == ["next"]
        next_one.cancel()


async def test_a_deadline_holds_in_the_queue_too(log: list[Any]) -> None:
    async with front(max_running=1) as house:
        house.target.script = hang()
        running = ask(house)
        await running.read()
        assert (await fails(ask(house, request_id="late", timeout=0.2))).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: house.admission.waiting == 0)
        assert [r["finish_reason"] for r in records(log) if r["request_id"] == "late"] == ["deadline"]
        running.cancel()


async def test_time_in_the_gateways_queue_is_queue_time_of_the_tag() -> None:
    async with front(max_running=1) as house:
        house.target.script = hang()
        running = ask(house)
        await running.read()
        house.target.script = plays(started(), chunk(), finished())
        waiting = ask(house)
        await eventually(lambda: house.admission.waiting == 1)
        await asyncio.sleep(0.1)
        running.cancel()
        tag = (await rest(waiting))[-1].finished.tag
        assert tag.time.queue_ms > 100
        assert tag.time.stream_ms < 100


async def test_bad_input_is_refused_even_when_the_queue_is_full() -> None:
    async with front(max_running=1, max_waiting=0) as house:
        house.target.script = hang()
        running = ask(house)
        await running.read()
        assert (await fails(ask(house))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        bad = common_pb2.SamplingParams(top_p=2)
        assert (await fails(ask(house, sampling=bad))).code() is grpc.StatusCode.INVALID_ARGUMENT
        running.cancel()


async def test_once_it_drains_open_streams_end_and_new_ones_are_turned_away(house: Front) -> None:
    go_on = asyncio.Event()

    async def waits(request: target_pb2.TargetServiceGenerateRequest, context: Context) -> AsyncIterator[Reply]:
        yield started()
        await go_on.wait()
        yield chunk()
        yield finished()

    house.target.script = waits
    call = ask(house)
    await call.read()
    draining = asyncio.create_task(house.servicer.drain(GENEROUS_S))
    await eventually(lambda: house.admission.closed)
    assert (await fails(ask(house))).code() is grpc.StatusCode.UNAVAILABLE
    assert not draining.done()
    go_on.set()
    assert (await rest(call))[-1].WhichOneof("message") == "finished"
    await draining


async def test_a_stream_that_outlasts_the_drain_is_the_servers_error_not_the_callers(
    house: Front, log: list[Any]
) -> None:
    house.target.script = hang()
    call = ask(house)
    await call.read()
    await house.servicer.drain(0.1)
    error = await fails(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(error.trailing_metadata())["slipstream-finish-reason"] == "error"
    await eventually(lambda: records(log))
    assert (records(log)[0]["finish_reason"], records(log)[0]["completion_tokens"]) == ("error", 3)


# Refusals, counts and health


async def test_a_refusal_that_names_hundreds_of_fields_still_fits_the_wire(house: Front) -> None:
    turns = [common_pb2.ChatMessage(role="boss", content="x")] * 500
    prompt = common_pb2.Prompt(chat=common_pb2.ChatPrompt(messages=turns))
    error = await fails(house.stub.Generate(gateway_pb2.GatewayServiceGenerateRequest(prompt=prompt)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt.chat.messages[0].role" in str(error.details())


async def test_a_bad_id_is_refused_and_kept_out_of_the_log(house: Front, log: list[Any]) -> None:
    error = await fails(ask(house, request_id="two\nlines"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    (record,) = records(log)
    assert record["request_id"] == dict(error.trailing_metadata())["slipstream-request-id"]
    assert "\n" not in record["request_id"]
    assert house.target.requests == []


async def test_tokens_are_counted_by_the_target(house: Front) -> None:
    request = gateway_pb2.CountTokensRequest(prompt=common_pb2.Prompt(text="four"))
    assert (await house.stub.CountTokens(request)).prompt_tokens == 4
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await house.stub.CountTokens(gateway_pb2.CountTokensRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_info_is_the_targets_and_says_when_it_cannot_be_had(house: Front) -> None:
    info = await house.stub.GetInfo(gateway_pb2.GatewayServiceGetInfoRequest())
    assert (info.model.model_id, info.HasField("draft")) == ("fake", False)
    assert info.draft_state == common_pb2.FALLBACK_REASON_DRAFT_ABSENT
    await house.target_server.stop(None)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await house.stub.GetInfo(gateway_pb2.GatewayServiceGetInfoRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_health_follows_the_target_down_and_up(house: Front) -> None:
    await eventually(lambda: house.health.serving)
    await house.target_health.set(False)
    await eventually(lambda: not house.health.serving)
    await house.target_health.set(True)
    await eventually(lambda: house.health.serving)
    await house.target_server.stop(None)
    await eventually(lambda: not house.health.serving)


async def test_a_request_that_never_started_adds_no_tokens_and_no_latency(house: Front) -> None:
    def counted(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"slipstream_gateway_{name}", labels) or 0.0

    def snapshot() -> tuple[float, ...]:
        modes = ("standard", "speculative")
        return tuple(counted("request_seconds_count", mode=mode) for mode in modes)

    before, refused = snapshot(), counted("refused_requests_total", status="INVALID_ARGUMENT")
    await fails(ask(house, mode=99))
    assert snapshot() == before
    await eventually(lambda: counted("refused_requests_total", status="INVALID_ARGUMENT") == refused + 1)
    await rest(ask(house))
    await eventually(lambda: sum(snapshot()) == sum(before) + 1)


async def test_a_mix_of_ends_leaves_nothing_behind(house: Front) -> None:
    scripts = [hang(), plays(started(), chunk(), finished()), plays(chunk()), plays()]

    async def mixed(request: target_pb2.TargetServiceGenerateRequest, context: Context) -> AsyncIterator[Reply]:
        async for reply in scripts[int(request.request_id) % 4](request, context):
            yield reply

    async def one(i: int) -> None:
        call = ask(house, request_id=str(i), timeout=0.4 if i % 8 == 0 else GENEROUS_S)
        if i % 8 == 4:
            await call.read()
            call.cancel()
            return
        with contextlib.suppress(grpc.aio.AioRpcError):
            await rest(call)

    house.target.script = mixed
    await asyncio.gather(*(one(i) for i in range(64)))
    await eventually(lambda: (house.target.live, house.admission.running, house.admission.waiting) == (0, 0, 0))
    assert isinstance(house.target, FakeTarget)
