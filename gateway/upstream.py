"""The target as the gateway sees it: its calls, its health, and what its failures mean for a caller."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import structlog
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from slipstream.v1 import target_pb2_grpc

from gateway.requests import MAX_VIOLATIONS
from services.serving.errors import (
    DeadlineExceeded,
    FieldViolation,
    Internal,
    InvalidRequest,
    QueueFull,
    SlipstreamError,
    Unavailable,
)
from services.serving.server import CHANNEL_OPTIONS, Health

log = structlog.get_logger()

RETRY_AFTER_S = 1.0
MAX_MESSAGE = 2048
"""Characters of a message that are passed on."""


class Upstream:
    """One channel to the target."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.target: target_pb2_grpc.TargetServiceAsyncStub = target_pb2_grpc.TargetServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close(grace=None)

    async def follow_health(self, own: Health) -> None:
        """Serve while the target serves; for as long as the gateway lives."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        while True:
            try:
                async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                    await self._set(own, answer.status == health_pb2.HealthCheckResponse.SERVING)
            except grpc.aio.AioRpcError:
                pass
            await self._set(own, False)
            await asyncio.sleep(0.1)

    @staticmethod
    async def _set(own: Health, serving: bool) -> None:
        if own.serving != serving:
            log.info("target serves" if serving else "target does not serve")
            await own.set(serving)


_KINDS: dict[grpc.StatusCode, type[SlipstreamError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def public_error(error: grpc.aio.AioRpcError) -> SlipstreamError:
    """What a failed call to the target is to the caller. Only words that the target wrote for callers are passed on."""
    kind = _KINDS.get(error.code())
    details = _details(error)
    if kind is InvalidRequest and details is not None:
        return InvalidRequest(details.message[:MAX_MESSAGE], violations=_violations(details)[:MAX_VIOLATIONS])
    if kind is QueueFull:
        return QueueFull("too many requests wait at the target", retry_after_s=RETRY_AFTER_S)
    if kind is DeadlineExceeded:
        return DeadlineExceeded("the deadline passed before the answer was complete")
    # CANCELLED here is the target's doing (it shuts down): the caller's own cancellation never comes as an error.
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unavailable("the target cannot be reached now", retry_after_s=RETRY_AFTER_S)
    log.error("target failed", code=error.code().name, details=error.details())
    return Internal("the target failed on this request; its log has it under this request's id")


def _details(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    """The google.rpc.Status that came with the error, if one did."""
    metadata: Any = error.trailing_metadata() or ()
    raw = next((value for key, value in metadata if key == "grpc-status-details-bin"), None)
    return None if raw is None else status_pb2.Status.FromString(raw)


def _violations(status: status_pb2.Status) -> list[FieldViolation]:
    found = []
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found += [FieldViolation(v.field, v.description) for v in bad.field_violations]
    return found
