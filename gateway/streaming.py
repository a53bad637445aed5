"""One stream's messages: the target's, counted and sent on as the caller's, and what metadata says beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import structlog
from slipstream.v1 import common_pb2, gateway_pb2, target_pb2

from gateway.record import Record, finish_word, mode_word
from services.serving.errors import DeadlineExceeded, Internal, Unavailable

log = structlog.get_logger()

ANSWERED = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)
"""Finish reasons of a whole answer."""
Context = grpc.aio.ServicerContext[Any, Any]
Response = gateway_pb2.GatewayServiceGenerateResponse


async def pass_on(event: target_pb2.TargetServiceGenerateResponse, record: Record, context: Context) -> None:
    """Count and send one message of the target.

    Raises Internal if it comes out of order, DeadlineExceeded or Unavailable if it ends an answer that is not whole.
    """
    kind = event.WhichOneof("message")
    if kind is None:
        return  # A kind that a newer target knows, and this gateway does not.
    if record.finished is not None or (record.started is None) != (kind == "started"):
        log.error("message out of order", kind=kind)
        raise Internal("the target's messages came out of order; the gateway's log has it under this request's id")
    match kind:
        case "started":
            record.start(event.started)
            await _send(context.send_initial_metadata(_header(record, event.started)))
            await _send(context.write(Response(started=_started(record, event.started))))
        case "chunk":
            record.add(event.chunk)
            chunk = gateway_pb2.GenerationChunk(token_ids=event.chunk.token_ids, text=event.chunk.text)
            await _send(context.write(Response(chunk=chunk)))
        case "finished":
            record.finish(event.finished)
            reason = event.finished.finish_reason
            if reason == common_pb2.FINISH_REASON_DEADLINE:
                raise DeadlineExceeded("the deadline passed before the answer was complete")
            if reason not in ANSWERED:
                raise Unavailable("the target gave the answer up before it was complete", retry_after_s=1.0)
            context.set_trailing_metadata(trailer(record, reason))
            finished = gateway_pb2.GenerationFinished(finish_reason=reason, usage=record.usage(), tag=record.tag())
            await _send(context.write(Response(finished=finished)))


async def _send(write: Awaitable[None]) -> None:
    """Write something. A caller that went away while it was held up is a cancellation, whichever way grpc tells it."""
    try:
        await write
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError("the caller cannot be written to") from error


def _started(record: Record, started: target_pb2.Started) -> gateway_pb2.GenerationStarted:
    return gateway_pb2.GenerationStarted(
        request_id=record.request_id,
        active_mode=started.active_mode,
        mode_reason=started.mode_reason,
        prompt_tokens=started.prompt_tokens,
        seed=started.seed,
    )


def _header(record: Record, started: target_pb2.Started) -> tuple[tuple[str, str], ...]:
    return (
        ("slipstream-request-id", record.request_id),
        ("slipstream-active-mode", mode_word(started.active_mode)),
        ("slipstream-mode-reason", _printable(started.mode_reason)),
    )


def trailer(record: Record, reason: common_pb2.FinishReason) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata, on every end."""
    return (
        ("slipstream-request-id", record.request_id),
        ("slipstream-finish-reason", finish_word(reason)),
        ("slipstream-usage-bin", record.usage().SerializeToString()),
        ("slipstream-tag-bin", record.tag().SerializeToString()),
    )


def _printable(text: str) -> str:
    """The text as metadata can carry it: printable ASCII."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)
