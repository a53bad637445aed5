"""``python -m services.draft``: the draft sidecar."""

from __future__ import annotations

import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from slipstream.v1 import common_pb2, draft_pb2, draft_pb2_grpc

from services.draft import metrics
from services.draft.settings import DraftSettings
from services.link.client import MESSAGE_BYTES
from services.link.round import ContextUpdate
from services.link.server import SESSIONS, Drafter
from services.link.socket import SocketError, SocketLock
from services.link.sweep import remove_left_behind
from services.serving.logging import configure_logging
from services.serving.metrics import serve_metrics
from services.serving.server import SERVER_OPTIONS
from services.serving.settings import from_environment

log = structlog.get_logger()

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
THREADS = SESSIONS + 4
"""One for each session, and some for health checks and GetInfo. Rounds run one at a time."""


def main() -> int:
    settings = from_environment(DraftSettings, "python -m services.draft: guesses tokens ahead for one target")
    configure_logging("draft", settings.log_level, settings.log_format)
    try:
        lock = SocketLock(settings.socket)
    except SocketError as error:
        log.error("cannot serve", detail=str(error))
        return 2
    try:
        return _serve(settings, lock)
    finally:
        lock.release()


def _serve(settings: DraftSettings, lock: SocketLock) -> int:
    # Heavy imports come after what can fail at once.
    import torch

    from services.draft.loading import load_drafter
    from services.model.errors import ModelError

    started = time.monotonic()
    try:
        drafter = load_drafter(settings)
    except ModelError as error:
        log.error("cannot load the draft", detail=str(error))
        return 2
    if drafter.info.model.compute_path == "fast":
        torch.set_num_threads(1)  # Small operators between passes: a second thread would only spin.
    _answer_once(drafter)
    if settings.shared_memory is not None and (removed := remove_left_behind(settings.shared_memory)):
        log.info("removed shared memory of a draft that was killed", segments=removed)
    try:
        server, checked = _server(drafter, settings, lock.address)
    except RuntimeError:  # grpc's, for a socket that cannot be bound; it has logged why.
        log.error("cannot listen on the socket")
        return 2
    model = drafter.info.model
    metrics.INFO.labels(model.model_id, drafter.name, model.compute_path, model.weights_fingerprint).set(1)
    log.info(
        "serving",
        drafter=drafter.name,
        model=model.model_id,
        compute_path=model.compute_path,
        metrics_port=serve_metrics(settings.metrics_port),
        seconds=round(time.monotonic() - started, 2),
    )
    _wait_for_signal()
    checked.enter_graceful_shutdown()
    # The target's stream never ends by itself, and the target goes on without a draft.
    server.stop(grace=min(0.2, settings.drain_seconds)).wait()
    log.info("stopped")
    return 0


def _server(drafter: Drafter, settings: DraftSettings, address: str) -> tuple[grpc.Server, health.HealthServicer]:
    """A server that is open, and says so: the drafter has answered."""
    from services.draft.servicer import DraftServicer

    server = grpc.server(ThreadPoolExecutor(THREADS), options=_options())
    draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(drafter, settings.shared_memory), server)
    checked = health.HealthServicer()
    for name in ("", SERVICE):
        checked.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checked, server)
    reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    server.add_insecure_port(address)
    server.start()
    return server, checked


def _answer_once(drafter: Drafter) -> None:
    """Guess once before saying SERVING: with a state of zeros where the draft is fed with states."""
    import numpy as np

    layers = len(drafter.info.feature_layers)
    features = np.zeros((1, layers, drafter.hidden_size), np.uint16) if layers else None
    sampling = common_pb2.SamplingParams(verification=common_pb2.VERIFICATION_BLOCK, top_p=1, repetition_penalty=1)
    length = min(2, drafter.info.max_draft_length)
    drafter.propose([ContextUpdate(0, 2, [0, 0], length, True, sampling, features, request_id="warm-up")])
    drafter.release([0])


def _wait_for_signal() -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()


def _options() -> list[tuple[str, int]]:
    """As every server's, but for tensors that ride inline."""
    sizes = {"grpc.max_receive_message_length": MESSAGE_BYTES, "grpc.max_send_message_length": MESSAGE_BYTES}
    return [*((k, v) for k, v in SERVER_OPTIONS if k not in sizes), *sizes.items()]


if __name__ == "__main__":
    sys.exit(main())
