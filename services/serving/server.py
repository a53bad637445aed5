"""What every gRPC server and channel needs, once: options, health, reflection, and a graceful end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import structlog
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

log = structlog.get_logger()

MAX_MESSAGE_BYTES = 8 * 1024 * 1024

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    # Prompts may be long, distributions are not sent between hosts: 8 MiB hold a prompt of over a million tokens.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Notice a dead peer within half a minute, also while a stream is idle.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Come back soon after a restart on the same host; the default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two servers on one port would share the requests out between them: refuse instead.
    ("grpc.so_reuseport", 0),
    # Allow the pings that CHANNEL_OPTIONS ask for.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class Health:
    """The health service: NOT_SERVING until told otherwise, for the server and each of its services."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = ("", *services)
        self.servicer = health_aio.HealthServicer()
        self.serving = False

    async def set(self, serving: bool) -> None:
        """Say whether requests will be answered."""
        self.serving = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            await self.servicer.set(service, status)


async def add_standard_services(server: grpc.aio.Server, services: Sequence[str]) -> Health:
    """Register health and reflection for the named services; health starts as NOT_SERVING."""
    checked = Health(services)
    await checked.set(False)
    health_pb2_grpc.add_HealthServicer_to_server(checked.servicer, server)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return checked


def bind(server: grpc.aio.Server, address: str) -> int:
    """Listen on an address; returns the port. Exits with code 2 and one line if it is taken."""
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        log.error("cannot listen", address=address)
        raise SystemExit(2) from error


async def run_until_terminated(
    server: grpc.aio.Server,
    checked: Health,
    drain_seconds: float,
    on_drain: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Then: health says NOT_SERVING, ``on_drain`` runs, new calls are refused, open
    ones have
    ``drain_seconds`` to end.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    log.info("draining", seconds=drain_seconds)
    await checked.set(False)
    if on_drain is not None:
        await on_drain()
    await server.stop(drain_seconds)
    log.info("stopped")
