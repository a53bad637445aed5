"""``python -m services.serving.probe ADDRESS``: exit code 0 if the server there says SERVING; for container health
checks."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def is_serving(address: str, timeout_s: float = 2.0) -> bool:
    """Whether the server's health service answers SERVING in time."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python -m services.serving.probe ADDRESS", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if is_serving(sys.argv[1]) else 1)
