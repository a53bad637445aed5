"""TargetService on the wire: requests to the engine, its events to streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import numpy as np
import structlog
from slipstream.v1 import common_pb2, target_pb2, target_pb2_grpc

from services.model.loading import LoadedModel
from services.serving.errors import FieldViolation, InvalidRequest, QueueFull, SlipstreamError, Unavailable, abort
from services.target.engine import Engine
from services.target.requests import MAX_DRAFT_LENGTH, RequestReader, Violations
from services.target.sequence import Emitted, Event, Finished, Judged, Request, Started
from services.target.settings import TargetSettings
from services.target.stopping import Finish
from services.target.verification import Proposal

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
RETRY_AFTER_S = 1.0
LONGEST_S = 3600.0
"""For calls without a deadline of their own."""


class Events:
    """What happens to one request, handed from the engine's thread to this loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def emit(self, event: Event) -> None:
        """Called on the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)
        except RuntimeError:
            log.debug("event after the loop has closed")

    async def next(self) -> Event:
        return await self._queue.get()


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Implements target.proto."""

    def __init__(
        self,
        engine: Engine,
        model: LoadedModel,
        info: common_pb2.ModelInfo,
        reader: RequestReader,
        settings: TargetSettings,
    ):
        self._engine = engine
        self._model = model
        self._info = info
        self._reader = reader
        self._settings = settings
        self.draining = False

    async def GetInfo(
        self, request: target_pb2.TargetServiceGetInfoRequest, context: Context
    ) -> target_pb2.TargetServiceGetInfoResponse:
        state, blocks = self._engine.speculation.state, self._engine.blocks
        response = target_pb2.TargetServiceGetInfoResponse(
            model=self._info,
            draft_state=state.reason,
            draft_length=self._settings.draft_length,
            max_sequences=self._settings.max_sequences,
            cache_tokens=blocks.total * 16,
            free_cache_tokens=blocks.free * 16,
            modes=[common_pb2.MODE_AUTO, common_pb2.MODE_STANDARD, common_pb2.MODE_SPECULATIVE],
        )
        if state.info is not None:
            response.draft.CopyFrom(state.info.model)
            response.drafter = state.info.drafters[0] if state.info.drafters else ""
        return response

    async def Tokenize(self, request: target_pb2.TokenizeRequest, context: Context) -> target_pb2.TokenizeResponse:
        try:
            violations = Violations()
            tokens = self._reader.prompt(request.prompt, violations)
            violations.raise_if_any()
        except SlipstreamError as error:
            await abort(context, error)
        return target_pb2.TokenizeResponse(token_ids=tokens)

    async def Generate(
        self, message: target_pb2.TargetServiceGenerateRequest, context: Context
    ) -> AsyncIterator[target_pb2.TargetServiceGenerateResponse]:
        structlog.contextvars.bind_contextvars(request_id=message.request_id)
        try:
            self._admit()
            request = self._reader.generate(message)
            async for event in self._events(request, context):
                match event:
                    case Started():
                        yield target_pb2.TargetServiceGenerateResponse(started=_started(event, request))
                    case Emitted():
                        yield target_pb2.TargetServiceGenerateResponse(chunk=_chunk(event))
                    case Finished():
                        if event.error is not None:
                            raise event.error
                        yield target_pb2.TargetServiceGenerateResponse(finished=_finished(event))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await abort(context, error)

    async def Verify(
        self, requests: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        try:
            self._admit()
            first = await anext(aiter(requests), None)
            if first is None:
                return
            if first.WhichOneof("message") != "open":
                raise InvalidRequest.of([FieldViolation("open", "must be the first message")])
            structlog.contextvars.bind_contextvars(request_id=first.open.request_id)
            async for response in self._verify(self._reader.verify_open(first.open), requests, context):
                yield response
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await abort(context, error)

    async def _verify(
        self, request: Request, requests: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        events = Events()
        sequence = self._submit(request, events, context)
        await events.next()
        opened = await _judged(events)
        length = opened.committed_length
        yield target_pb2.VerifyResponse(
            opened=target_pb2.VerifyOpened(
                prompt_tokens=len(request.prompt), token_id=opened.verdict.token, committed_length=length
            )
        )
        async for message in requests:
            room = request.limit - length
            proposal = _read_proposal(message, length, room, self._info.vocabulary_size)
            self._engine.propose(sequence, proposal)
            judged = await _judged(events)
            length = judged.committed_length
            yield target_pb2.VerifyResponse(result=_result(judged))

    async def _events(self, request: Request, context: Context) -> AsyncIterator[Event]:
        """The events of a request to its end. Whatever ends the caller's interest, the engine hears of it."""
        events = Events()
        self._submit(request, events, context)
        while True:
            event = await events.next()
            yield event
            if isinstance(event, Finished):
                return

    def _submit(self, request: Request, events: Events, context: Context) -> int:
        """Queue a request. It ends with its deadline or its call at the latest, even if nobody runs the generator that
        waits for its events to the end."""
        sequence = self._engine.submit(request, self._model.tokenizer.stream(), events.emit)
        left = context.time_remaining()
        deadline = asyncio.get_running_loop().call_later(
            LONGEST_S if left is None else max(left, 0.0), self._engine.cancel, sequence, Finish.DEADLINE
        )

        def gone(_: Any) -> None:
            deadline.cancel()
            self._engine.cancel(sequence)

        context.add_done_callback(cast(Any, gone))
        return sequence

    def _admit(self) -> None:
        """Raises QueueFull or Unavailable for a request that cannot wait here."""
        if self.draining:
            raise Unavailable("the target is shutting down", retry_after_s=RETRY_AFTER_S)
        if self._engine.live >= self._settings.max_sequences + self._settings.max_waiting:
            raise QueueFull("too many requests wait at the target", retry_after_s=RETRY_AFTER_S)


async def _judged(events: Events) -> Judged:
    """The next verdict. Raises what ended the sequence instead."""
    event = await events.next()
    if isinstance(event, Judged):
        return event
    if isinstance(event, Finished) and event.error is not None:
        raise event.error
    raise InvalidRequest.of([FieldViolation("propose", "the sequence has reached the end of its context")])


def _read_proposal(message: target_pb2.VerifyRequest, length: int, room: int, vocabulary: int) -> Proposal:
    """A caller's guesses. Raises InvalidRequest naming the field."""
    if message.WhichOneof("message") != "propose":
        raise InvalidRequest.of([FieldViolation("open", "a stream is opened once")])
    propose, violations = message.propose, Violations()
    count, longest = len(propose.tokens), min(MAX_DRAFT_LENGTH, room - 1)
    violations.check(1 <= count <= longest, "propose.tokens", f"1 to {longest} guesses, got {count}")
    for i, token in enumerate(propose.tokens):
        violations.check(0 <= token < vocabulary, f"propose.tokens[{i}]", f"in [0, {vocabulary - 1}]")
    violations.check(
        propose.base_length == length,
        "propose.base_length",
        f"{propose.base_length} is stale, the sequence has {length} tokens",
    )
    q = None
    if propose.distribution:
        size = 4 * count * vocabulary
        field = "propose.distribution"
        fits = violations.check(
            len(propose.distribution) == size,
            field,
            f"{size} bytes for {count} guesses, got {len(propose.distribution)}",
        )
        if fits:
            q = np.frombuffer(propose.distribution, "<f4").reshape(count, vocabulary)
            positive = bool(np.isfinite(q).all() and (q >= 0).all())
            violations.check(positive, field, "finite and not negative")
            sums = positive and bool((np.abs(q.sum(-1, dtype=np.float64) - 1) < 1e-3).all())
            violations.check(not positive or sums, field, "each row must sum to 1")
    violations.raise_if_any()
    return Proposal(list(propose.tokens), q)


def _result(judged: Judged) -> target_pb2.VerifyResult:
    verdict = judged.verdict
    bonus = verdict.accepted == judged.drafted
    return target_pb2.VerifyResult(
        accepted=verdict.accepted,
        token_id=verdict.token,
        origin=target_pb2.TOKEN_ORIGIN_BONUS if bonus else target_pb2.TOKEN_ORIGIN_CORRECTION,
        committed_length=judged.committed_length,
    )


def _started(event: Started, request: Request) -> target_pb2.Started:
    return target_pb2.Started(
        active_mode=event.active_mode,
        mode_reason=event.mode_reason,
        prompt_tokens=len(request.prompt),
        seed=request.sampling.seed,
    )


def _chunk(event: Emitted) -> target_pb2.Chunk:
    return target_pb2.Chunk(
        token_ids=event.tokens,
        text=event.text,
        num_draft_tokens=event.drafted,
        num_accepted_draft_tokens=event.accepted,
    )


def _finished(event: Finished) -> target_pb2.Finished:
    return target_pb2.Finished(
        finish_reason=f"FINISH_REASON_{event.reason.value}",
        usage=common_pb2.Usage(prompt_tokens=event.prompt_tokens, completion_tokens=event.completion_tokens),
        tag=event.tag,
    )


async def warm_up(engine: Engine, request: Request, model: LoadedModel) -> float:
    """Let the model answer once. Returns how long it took, seconds; raises what went wrong."""
    started = time.perf_counter()
    events = Events()
    engine.submit(request, model.tokenizer.stream(), events.emit)
    while not isinstance(event := await events.next(), Finished):
        pass
    if event.error is not None:
        raise event.error
    return time.perf_counter() - started
