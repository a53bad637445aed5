"""Errors leave a service with their status, the fields that are wrong, a hint when to come back, and no inner text."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2

from services.serving.errors import FieldViolation, Internal, InvalidRequest, QueueFull, public, to_rpc_status


def test_bad_fields_travel_as_bad_request() -> None:
    status = to_rpc_status(InvalidRequest.of([FieldViolation("a.b", "in [0, 1]"), FieldViolation("c", "missing")]))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert status.message == "a.b: in [0, 1]; c: missing"
    bad = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad)
    assert [(v.field, v.description) for v in bad.field_violations] == [("a.b", "in [0, 1]"), ("c", "missing")]


def test_a_full_queue_says_when_to_come_back() -> None:
    status = to_rpc_status(QueueFull("full", retry_after_s=1.5))
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


def test_the_text_of_an_unexpected_error_stays_inside() -> None:
    shown = public(RuntimeError("/secret/path"))
    assert isinstance(shown, Internal)
    assert "secret" not in shown.message
