"""``python -m services.target``: the model that is served."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import grpc
import structlog
from slipstream.v1 import common_pb2, target_pb2, target_pb2_grpc

from services.serving.logging import configure_logging
from services.serving.metrics import serve_metrics
from services.serving.server import SERVER_OPTIONS, add_standard_services, bind, run_until_terminated
from services.serving.settings import from_environment
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from services.link.client import DraftLink
    from services.model.loading import LoadedModel

log = structlog.get_logger()

SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name


def main() -> int:
    settings = from_environment(TargetSettings, "python -m services.target: serves one model, with a draft's help")
    configure_logging("target", settings.log_level, settings.log_format)
    import torch

    from services.model.errors import ModelError
    from services.model.loading import LoadSettings, load
    from services.model.store import prepare

    started = time.monotonic()
    try:
        model = load(
            prepare(settings.model),
            LoadSettings(settings.compute_path, threads=settings.threads, cache_tokens=settings.cache_tokens),
        )
    except ModelError as error:
        log.error("cannot load the model", detail=str(error))
        return 2
    if model.forward_pass.compute_path == "fast":
        torch.set_num_threads(1)  # Small operators between passes: a second thread would only spin.
    model.forward_pass.allocate_cache(model.cache_blocks)
    log.info("model loaded", **model.info(), seconds=round(time.monotonic() - started, 2))
    asyncio.run(_serve(settings, model))
    return 0


def _link(settings: TargetSettings, model: LoadedModel, info: common_pb2.ModelInfo) -> DraftLink | None:
    from services.link.client import DraftLink

    if settings.speculation == "off" or not settings.draft:
        return None
    budget = settings.round_budget_ms / 1e3
    forward = model.forward_pass
    return DraftLink(settings.draft, info, forward.hidden_size, budget, settings.shared_memory, forward.num_layers)


async def _serve(settings: TargetSettings, model: LoadedModel) -> None:
    from services.model.sampling import SamplingParams, Verification
    from services.target import metrics
    from services.target.block_manager import BlockManager
    from services.target.engine import Engine
    from services.target.model_runner import ModelRunner
    from services.target.requests import Limits, RequestReader
    from services.target.scheduler import Scheduler
    from services.target.sequence import Mode, Request
    from services.target.servicer import TargetServicer, warm_up
    from services.target.speculation import Speculation
    from services.target.stopping import StopConditions

    info = common_pb2.ModelInfo(**model.info())
    link = _link(settings, model, info)
    absent = (
        common_pb2.FALLBACK_REASON_DISABLED
        if settings.speculation == "off"
        else common_pb2.FALLBACK_REASON_DRAFT_ABSENT
    )
    blocks = BlockManager(model.cache_blocks)
    scheduler = Scheduler(blocks, settings.max_sequences, settings.prefill_rows)
    engine = Engine(ModelRunner(model.forward_pass), scheduler, Speculation(link, settings.draft_length, absent))
    context = min(settings.context or info.context_limit, info.context_limit, blocks.total * 16)
    limits = Limits(info.vocabulary_size, context, Verification(settings.verification))
    info.context_limit = context
    servicer = TargetServicer(
        engine, model, info, RequestReader(model.tokenizer, limits, settings.draft_length), settings
    )

    server = grpc.aio.server(options=SERVER_OPTIONS)
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
    checked = await add_standard_services(server, [SERVICE])
    bind(server, settings.address)
    await server.start()
    port = serve_metrics(settings.metrics_port)
    metrics.INFO.labels(info.model_id, info.compute_path, info.weight_format, info.weights_fingerprint).set(1)
    metrics.DRAFT_ATTACHED.set_function(lambda: float(engine.speculation.state.ready))
    engine.start()
    probe = Request("warm-up", (0,), SamplingParams(), StopConditions(2), Mode.STANDARD, common_pb2.MODE_STANDARD, 0)
    seconds = await warm_up(engine, probe, model)
    if link is not None:
        link.start()
    await checked.set(True)
    log.info("serving", address=settings.address, metrics_port=port, first_answer_s=round(seconds, 3))

    async def stop_admitting() -> None:
        servicer.draining = True

    await run_until_terminated(server, checked, settings.drain_seconds, stop_admitting)
    engine.stop()
    if link is not None:
        link.close()


if __name__ == "__main__":
    sys.exit(main())
