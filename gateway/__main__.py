"""``python -m gateway``: the front that internal services call."""

from __future__ import annotations

import asyncio
import sys

import grpc
import structlog
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

from gateway import metrics
from gateway.admission import Admission
from gateway.servicer import GatewayServicer
from gateway.settings import GatewaySettings
from gateway.upstream import Upstream
from services.serving.logging import configure_logging
from services.serving.metrics import serve_metrics
from services.serving.server import SERVER_OPTIONS, add_standard_services, bind, run_until_terminated
from services.serving.settings import from_environment

log = structlog.get_logger()

SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].full_name


def main() -> int:
    settings = from_environment(GatewaySettings, "python -m gateway: streams answers of one target")
    configure_logging("gateway", settings.log_level, settings.log_format)
    asyncio.run(_serve(settings))
    return 0


async def _serve(settings: GatewaySettings) -> None:
    upstream, admission = Upstream(settings.target), Admission(settings.max_running, settings.max_waiting)
    metrics.RUNNING.set_function(lambda: admission.running)
    metrics.WAITING.set_function(lambda: admission.waiting)
    server = grpc.aio.server(options=_options(settings))
    servicer = GatewayServicer(upstream, admission, settings)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    checked = await add_standard_services(server, [SERVICE])
    bind(server, settings.address)
    await server.start()
    port = serve_metrics(settings.metrics_port)
    following = asyncio.create_task(upstream.follow_health(checked))
    log.info("serving", address=settings.address, target=settings.target, metrics_port=port)

    async def stop_admitting() -> None:
        following.cancel()
        await checked.set(False)  # The last word, whatever the target said in between.
        await servicer.drain(settings.drain_seconds)

    await run_until_terminated(server, checked, settings.drain_seconds, stop_admitting)
    await upstream.close()


def _options(settings: GatewaySettings) -> list[tuple[str, int]]:
    """A message over the limit is refused with words before it is too large for the wire."""
    name = "grpc.max_receive_message_length"
    return [*((k, v) for k, v in SERVER_OPTIONS if k != name), (name, 2 * settings.max_request_bytes)]


if __name__ == "__main__":
    sys.exit(main())
