"""GatewayService on the wire: admit, pass on, stream back, and keep a record however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import structlog
from slipstream.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc, target_pb2

from gateway import metrics
from gateway.admission import RETRY_AFTER_S, Admission
from gateway.record import Record
from gateway.requests import accepted_id, check_count, check_size, to_target
from gateway.settings import GatewaySettings
from gateway.streaming import ANSWERED, Context, pass_on, trailer
from gateway.upstream import Upstream, public_error
from services.serving.errors import DeadlineExceeded, SlipstreamError, Unavailable, abort, public

log = structlog.get_logger()

VERSION = "0.1.0"


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Implements gateway.proto."""

    def __init__(self, upstream: Upstream, admission: Admission, settings: GatewaySettings) -> None:
        self._upstream = upstream
        self._admission = admission
        self._settings = settings
        self._open: set[asyncio.Timeout] = set()
        self._stopped = False

    async def drain(self, seconds: float) -> None:
        """Admit nobody any more; return when all who were admitted have their answer. After so many seconds, those
        that are still open end as UNAVAILABLE."""
        self._admission.close()
        try:
            await asyncio.wait_for(self._admission.idle(), seconds)
        except TimeoutError:
            self._stopped = True
            for limit in self._open:
                if not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time())

    async def GetInfo(
        self, request: gateway_pb2.GatewayServiceGetInfoRequest, context: Context
    ) -> gateway_pb2.GatewayServiceGetInfoResponse:
        async with _errors_told(context):
            info = await self._upstream.target.GetInfo(
                target_pb2.TargetServiceGetInfoRequest(), timeout=_left(context, 5)
            )
        response = gateway_pb2.GatewayServiceGetInfoResponse(
            model=info.model, drafter=info.drafter, draft_state=info.draft_state, modes=info.modes, version=VERSION
        )
        if info.HasField("draft"):
            response.draft.CopyFrom(info.draft)
        return response

    async def CountTokens(
        self, request: gateway_pb2.CountTokensRequest, context: Context
    ) -> gateway_pb2.CountTokensResponse:
        async with _errors_told(context):
            check_size(request, self._settings.max_request_bytes)
            check_count(request)
            answer = await self._upstream.target.Tokenize(
                target_pb2.TokenizeRequest(prompt=request.prompt), timeout=_left(context, 30)
            )
        return gateway_pb2.CountTokensResponse(prompt_tokens=len(answer.token_ids))

    # A coroutine that writes, not a generator: a cancellation that comes while a slow reader holds a message up then
    # arrives here, and not in grpc's code around a generator that nobody closes.
    async def Generate(  # type: ignore[override]
        self, request: gateway_pb2.GatewayServiceGenerateRequest, context: Context
    ) -> None:
        record = Record(accepted_id(request.request_id), request.mode or common_pb2.MODE_AUTO)
        structlog.contextvars.bind_contextvars(request_id=record.request_id)
        reason, status = common_pb2.FINISH_REASON_ERROR, grpc.StatusCode.OK
        failure: SlipstreamError | None = None
        try:
            check_size(request, self._settings.max_request_bytes)
            message = to_target(request, record.request_id)
            async with self._limited(context), self._admission.place():
                record.waited_s = record.seconds
                await self._stream(message, record, context)
            assert record.finished is not None
            reason = record.finished.finish_reason
        except asyncio.CancelledError:
            reason, status = _interrupted(record, context)
            raise
        except Exception as error:
            failure = self._failure(error, context)
            status = failure.status
            if isinstance(failure, DeadlineExceeded):
                reason = common_pb2.FINISH_REASON_DEADLINE
        finally:
            record.close(reason, status)
            metrics.observe(record, reason, status)
        if failure is not None:  # Told after the record: a caller that does not read can hold this up for long.
            await abort(context, failure, trailer(record, reason))

    @asynccontextmanager
    async def _limited(self, context: Context) -> AsyncIterator[None]:
        """Raises TimeoutError when the caller's deadline, the longest time served, or the drain is over."""
        async with asyncio.timeout(_left(context, self._settings.max_seconds)) as limit:
            self._open.add(limit)
            try:
                yield
            finally:
                self._open.discard(limit)

    async def _stream(self, message: target_pb2.TargetServiceGenerateRequest, record: Record, context: Context) -> None:
        """Pass the target's messages on. Raises AioRpcError, DeadlineExceeded, Internal for messages out of order, or
        Unavailable if the stream stops short."""
        call = self._upstream.target.Generate(
            message, timeout=_left(context, self._settings.max_seconds), metadata=(("x-request-id", record.request_id),)
        )
        try:
            async for event in call:
                await pass_on(event, record, context)
        finally:
            call.cancel()
        if record.finished is None:
            raise Unavailable("the target ended the stream before the answer was complete", retry_after_s=RETRY_AFTER_S)

    def _failure(self, error: Exception, context: Context) -> SlipstreamError:
        """The error as the caller may see it."""
        if isinstance(error, grpc.aio.AioRpcError):
            return public_error(error)
        if not isinstance(error, TimeoutError):
            return public(error)
        if self._stopped:
            return Unavailable("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        if context.time_remaining() is None:
            longest = f"{self._settings.max_seconds:g} s"
            return DeadlineExceeded(f"the answer was not complete within {longest}, the longest that is served")
        return DeadlineExceeded("the deadline passed before the answer was complete")


def _interrupted(record: Record, context: Context) -> tuple[common_pb2.FinishReason, grpc.StatusCode]:
    """Why grpc cancelled the handler: the deadline passed, or the caller went away, maybe with the whole answer."""
    if record.finished is not None and record.finished.finish_reason in ANSWERED:
        return record.finished.finish_reason, grpc.StatusCode.OK
    left = context.time_remaining()
    if left is not None and left <= 0:
        return common_pb2.FINISH_REASON_DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED
    return common_pb2.FINISH_REASON_CANCELLED, grpc.StatusCode.CANCELLED


@asynccontextmanager
async def _errors_told(context: Context) -> AsyncIterator[None]:
    """Whatever goes wrong inside ends the RPC with a public error."""
    try:
        yield
    except Exception as error:
        await abort(context, public_error(error) if isinstance(error, grpc.aio.AioRpcError) else error)


def _left(context: Context, longest: float) -> float:
    """Seconds that the caller's deadline leaves, at most ``longest``."""
    left = context.time_remaining()
    return longest if left is None else max(0.0, min(left, longest))
