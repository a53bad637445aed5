"""The catalogue of errors that leave a service: status, message for the caller, and google.rpc details.

What a client reads is what stands here; anything else that goes wrong is logged in full and sent as INTERNAL without
its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request: its path in the message, and what it may be."""

    field: str
    description: str


class SlipstreamError(Exception):
    """An error whose message is written for the caller."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self, message: str, *, violations: Sequence[FieldViolation] = (), retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s


class InvalidRequest(SlipstreamError):
    """The request can never succeed as it is."""

    status = grpc.StatusCode.INVALID_ARGUMENT

    @classmethod
    def of(cls, violations: Sequence[FieldViolation]) -> InvalidRequest:
        """Names each bad field in the message as well as in the details."""
        return cls("; ".join(f"{v.field}: {v.description}" for v in violations), violations=violations)


class Unsupported(InvalidRequest):
    """The request asks for something that is not built."""


class QueueFull(SlipstreamError):
    """More requests wait than may wait."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceeded(SlipstreamError):
    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(SlipstreamError):
    status = grpc.StatusCode.CANCELLED


class Unavailable(SlipstreamError):
    """The service cannot answer now; trying again may help."""

    status = grpc.StatusCode.UNAVAILABLE


class Internal(SlipstreamError):
    status = grpc.StatusCode.INTERNAL


def to_rpc_status(error: SlipstreamError) -> status_pb2.Status:
    """The error as google.rpc.Status, with BadRequest and RetryInfo where they apply."""
    details: list[Any] = []
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(field=violation.field, description=violation.description)
        details.append(bad)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=error.status.value[0], message=error.message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def public(error: BaseException) -> SlipstreamError:
    """The error itself if it is written for callers; otherwise it is logged, and INTERNAL stands for it."""
    if isinstance(error, SlipstreamError):
        return error
    log.error("unexpected error", exc_info=error)
    return Internal("internal error; the service's log has it under this request's id")


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: BaseException, metadata: Sequence[tuple[str, str | bytes]] = ()
) -> NoReturn:
    """End an RPC with the error's status and details, and further trailing metadata."""
    status = rpc_status.to_status(to_rpc_status(public(error)))
    await context.abort(status.code, status.details, cast(Any, (*status.trailing_metadata, *metadata)))
    raise AssertionError("abort does not return")
