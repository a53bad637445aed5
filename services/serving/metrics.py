"""Prometheus metrics over HTTP, and the buckets that the services share."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

LATENCY_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120
)  # fmt: skip
"""Seconds: from a round to a long answer."""


def serve_metrics(port: int, registry: CollectorRegistry = REGISTRY) -> int | None:
    """Serve /metrics on all interfaces; returns the port (0 picks a free one), None where ``port`` is -1."""
    if port < 0:
        return None
    server, _ = start_http_server(port, registry=registry)
    return int(server.server_port)
