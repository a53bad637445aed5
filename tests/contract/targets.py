"""A target in the test's hands, behind a real gateway, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from slipstream.v1 import common_pb2, gateway_pb2_grpc, target_pb2, target_pb2_grpc

from gateway.admission import Admission
from gateway.servicer import GatewayServicer
from gateway.settings import GatewaySettings
from gateway.upstream import Upstream
from services.serving.server import Health, add_standard_services

Context = grpc.aio.ServicerContext[Any, Any]
Reply = target_pb2.TargetServiceGenerateResponse
Script = Callable[[target_pb2.TargetServiceGenerateRequest, Context], AsyncIterator[Reply]]


def started(mode: int = common_pb2.MODE_SPECULATIVE, reason: str = "") -> Reply:
    return Reply(started=target_pb2.Started(active_mode=mode, mode_reason=reason, prompt_tokens=7, seed=5))


def chunk(count: int = 1, drafted: int = 0, accepted: int = 0, text: str = "a") -> Reply:
    tokens = range(count)
    return Reply(
        chunk=target_pb2.Chunk(
            token_ids=tokens, text=text, num_draft_tokens=drafted, num_accepted_draft_tokens=accepted
        )
    )


def finished(reason: int = common_pb2.FINISH_REASON_STOP, tokens: int = 1) -> Reply:
    tag = common_pb2.OptimizationTag(
        active_mode=common_pb2.MODE_STANDARD,
        tokens_by_origin=common_pb2.TokensByOrigin(standard=tokens),
        time=common_pb2.TimeSplit(queue_ms=1, prefill_ms=2, verify_ms=3),
    )
    usage = common_pb2.Usage(prompt_tokens=7, completion_tokens=tokens)
    return Reply(finished=target_pb2.Finished(finish_reason=reason, usage=usage, tag=tag))


async def answers(request: target_pb2.TargetServiceGenerateRequest, context: Context) -> AsyncIterator[Reply]:
    """One token, then the end."""
    yield started()
    yield chunk()
    yield finished()


class FakeTarget(target_pb2_grpc.TargetServiceServicer):
    """Plays a script, and notes what reached it and how each call ended."""

    def __init__(self) -> None:
        self.script: Script = answers
        self.requests: list[target_pb2.TargetServiceGenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.time_left: list[float | None] = []
        self.live = 0
        self.ended = asyncio.Event()

    async def Generate(
        self, request: target_pb2.TargetServiceGenerateRequest, context: Context
    ) -> AsyncIterator[Reply]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))  # type: ignore[arg-type]
        self.time_left.append(context.time_remaining())
        self.live += 1
        context.add_done_callback(self._end)
        async for reply in self.script(request, context):
            yield reply

    def _end(self, context: object) -> None:
        self.live -= 1
        self.ended.set()

    async def Tokenize(self, request: target_pb2.TokenizeRequest, context: Context) -> target_pb2.TokenizeResponse:
        return target_pb2.TokenizeResponse(token_ids=range(len(request.prompt.text)))

    async def GetInfo(
        self, request: target_pb2.TargetServiceGetInfoRequest, context: Context
    ) -> target_pb2.TargetServiceGetInfoResponse:
        return target_pb2.TargetServiceGetInfoResponse(
            model=common_pb2.ModelInfo(model_id="fake"), draft_state=common_pb2.FALLBACK_REASON_DRAFT_ABSENT
        )


@dataclass
class Front:
    """A gateway before a fake target, and a caller's stub."""

    target: FakeTarget
    target_server: grpc.aio.Server
    target_health: Health
    admission: Admission
    address: str
    server: grpc.aio.Server
    servicer: GatewayServicer
    health: Health
    stub: Any


@asynccontextmanager
async def front(**settings: Any) -> AsyncIterator[Front]:
    """Start both servers on free ports; stop them at the end."""
    target, target_server = FakeTarget(), grpc.aio.server()
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, target_server)
    target_health = await add_standard_services(target_server, [])
    await target_health.set(True)
    port = target_server.add_insecure_port("127.0.0.1:0")
    await target_server.start()

    limits = GatewaySettings(**settings)
    upstream, admission = Upstream(f"127.0.0.1:{port}"), Admission(limits.max_running, limits.max_waiting)
    server = grpc.aio.server()
    servicer = GatewayServicer(upstream, admission, limits)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    health = await add_standard_services(server, [])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    following = asyncio.create_task(upstream.follow_health(health))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        try:
            yield Front(target, target_server, target_health, admission, address, server, servicer, health, stub)
        finally:
            following.cancel()
            await server.stop(None)
            await upstream.close()
            await target_server.stop(None)


async def eventually(condition: Callable[[], Any], timeout_s: float = 10) -> None:
    """Let the loop run until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
