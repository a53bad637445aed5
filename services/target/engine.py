"""The loop: schedule, propose, run, verify, commit, stream.

One thread runs it. Others speak to it through :meth:`Engine.submit`, :meth:`Engine.cancel` and :meth:`Engine.propose`,
which return at once; what happens to a request comes back through its ``emit``, called on the engine's thread.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
import structlog
import torch
from slipstream.v1 import common_pb2

from services.link.round import OK, RoundResult
from services.model.sampling import DistributionError
from services.model.text_stream import TextStream
from services.target import metrics
from services.target.block_manager import BlockManager
from services.target.model_runner import ModelRunner, Result
from services.target.scheduler import Scheduled, Scheduler
from services.target.sequence import Emitted, Event, Finished, Judged, Mode, Request, Sequence, Started
from services.target.speculation import Speculation
from services.target.statistics import in_words
from services.target.stopping import Answer, Finish
from services.target.verification import Proposal, Verdict, verify

log = structlog.get_logger()

Command = Callable[[], None]


class Engine:
    """Decodes many requests at once, with a draft's guesses where there are any."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, speculation: Speculation) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self.speculation = speculation
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._live: dict[int, Sequence] = {}
        self._ids = itertools.count(1)
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    @property
    def blocks(self) -> BlockManager:
        return self._scheduler.blocks

    @property
    def live(self) -> int:
        """Requests that are not over."""
        return len(self._live)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the round that runs; open requests end as cancelled."""
        self._commands.put(self._stop)
        self._thread.join()

    def submit(self, request: Request, stream: TextStream, emit: Callable[[Event], None]) -> int:
        """Queue a request; returns its id. The last event is always Finished."""
        sequence = Sequence(next(self._ids), request, Answer(request.stop, stream), emit)
        self._commands.put(lambda: self._add(sequence))
        return sequence.id

    def cancel(self, sequence_id: int, reason: Finish = Finish.CANCELLED) -> None:
        """End a request before its next round. A request that is over is left alone."""
        self._commands.put(lambda: self._cancel(sequence_id, reason))

    def propose(self, sequence_id: int, proposal: Proposal) -> None:
        """The next proposal of a caller of Verify."""
        self._commands.put(lambda: self._set_proposal(sequence_id, proposal))

    # --- the engine's thread ---

    def _loop(self) -> None:
        with torch.inference_mode():
            scheduled: list[Scheduled] = []
            while not self._stopping:
                self._take_commands(wait=not scheduled)
                scheduled = self._schedule()
                if scheduled:
                    self._round(scheduled)
        for sequence in list(self._live.values()):
            self._finish(sequence, Finish.CANCELLED)

    def _round(self, scheduled: list[Scheduled]) -> None:
        try:
            proposals, drafted = self._propose(scheduled)
            results, pass_time = self._run(scheduled, proposals)
        except Exception as error:
            log.error("pass failed", exc_info=error)
            for item in scheduled:
                self._finish(item.sequence, Finish.ERROR, error)
            return
        for result in results:
            try:
                self._advance(result, pass_time, drafted)
            except Exception as error:
                self._fail(result.item.sequence, error)

    def _take_commands(self, wait: bool) -> None:
        """Everything that was asked for since; waits for something where there was nothing to run."""
        if wait:
            self._commands.get()()
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _schedule(self) -> list[Scheduled]:
        for sequence in self._scheduler.admit():
            sequence.statistics.times.queue = time.perf_counter() - sequence.arrived
            self._start(sequence)
        scheduled = self._scheduler.schedule()
        metrics.observe_load(self._scheduler)
        return scheduled

    def _start(self, sequence: Sequence) -> None:
        mode, sequence.mode_reason = active_mode(sequence.request, self.speculation.why_not(sequence))
        sequence.started = True
        sequence.emit(Started(mode, sequence.mode_reason))

    def _propose(self, scheduled: list[Scheduled]) -> tuple[dict[int, Proposal], RoundResult]:
        proposals, result = self.speculation.propose(scheduled)
        for item in scheduled:
            if item.sequence.proposal is not None:
                proposals[item.sequence.id] = item.sequence.proposal
        metrics.observe_proposals(result)
        return proposals, result

    def _run(self, scheduled: list[Scheduled], proposals: Mapping[int, Proposal]) -> tuple[list[Result], float]:
        started = time.perf_counter()
        results = self._runner.run(scheduled, proposals, self.speculation.feature_layers)
        elapsed = time.perf_counter() - started
        metrics.observe_pass(elapsed, sum(r.item.rows + len(r.proposal.tokens) for r in results))
        return results, elapsed

    def _advance(self, result: Result, pass_time: float, drafted: RoundResult) -> None:
        """What one pass means for one sequence. Raises DistributionError for logits that are not numbers."""
        sequence, first = result.item.sequence, result.item.sequence.cached
        _count_time(sequence, pass_time, drafted, bool(result.proposal.tokens))
        if result.logits is None:
            sequence.cached += result.item.rows
            self.speculation.note(sequence, first, result.features)
            return
        started = time.perf_counter()
        logits: np.ndarray = result.logits.numpy()
        verdict = verify(
            logits,
            result.proposal,
            sequence.request.sampling,
            sequence.history,
            len(sequence.committed),
            sequence.noise,
        )
        self._commit(sequence, result, verdict, first)
        sequence.statistics.times.verify += time.perf_counter() - started

    def _commit(self, sequence: Sequence, result: Result, verdict: Verdict, first: int) -> None:
        guesses = result.proposal.tokens
        tokens, text = sequence.answer.extend([*guesses[: verdict.accepted], verdict.token])
        sequence.commit(tokens)
        accepted = sequence.statistics.add_round(len(guesses), verdict.accepted, len(tokens))
        metrics.observe_round(len(guesses), accepted)
        if sequence.answer.finish is None:
            kept = None if result.features is None else result.features[: result.item.rows + verdict.accepted]
            self.speculation.note(sequence, first, kept)
        sequence.proposal = None
        self._stream(sequence, verdict, tokens, text, len(guesses), accepted)

    def _stream(
        self, sequence: Sequence, verdict: Verdict, tokens: list[int], text: str, drafted: int, accepted: int
    ) -> None:
        if sequence.request.mode is Mode.EXTERNAL:
            sequence.emit(Judged(verdict, drafted, len(sequence.committed)))
        else:
            sequence.emit(Emitted(tokens, text, drafted, accepted))
        if sequence.answer.finish is not None:
            self._finish(sequence, sequence.answer.finish)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """One request's own failure ends that request only."""
        level = log.warning if isinstance(error, DistributionError) else log.error
        level("request failed", request_id=sequence.request.request_id, exc_info=error)
        self._finish(sequence, Finish.ERROR, error)

    def _finish(self, sequence: Sequence, reason: Finish, error: BaseException | None = None) -> None:
        """Every way out leads through here, once."""
        if self._live.pop(sequence.id, None) is None:
            return
        self._scheduler.remove(sequence)
        self.speculation.release(sequence)
        tag = sequence.tag()
        metrics.observe_load(self._scheduler)
        metrics.observe_request(reason, tag, time.perf_counter() - sequence.arrived)
        log.info(
            "request finished",
            request_id=sequence.request.request_id,
            finish_reason=reason.value.lower(),
            prompt_tokens=len(sequence.request.prompt),
            completion_tokens=sequence.statistics.completion_tokens,
            rounds=tag.num_spec_steps,
            accepted=tag.num_accepted_draft_tokens,
        )
        sequence.emit(Finished(reason, error, len(sequence.request.prompt), sequence.statistics.completion_tokens, tag))

    def _add(self, sequence: Sequence) -> None:
        self._live[sequence.id] = sequence
        self._scheduler.add(sequence)

    def _cancel(self, sequence_id: int, reason: Finish) -> None:
        sequence = self._live.get(sequence_id)
        if sequence is not None:
            self._finish(sequence, reason)

    def _set_proposal(self, sequence_id: int, proposal: Proposal) -> None:
        sequence = self._live.get(sequence_id)
        if sequence is not None:
            sequence.proposal = proposal

    def _stop(self) -> None:
        self._stopping = True


def active_mode(request: Request, why_not: common_pb2.FallbackReason) -> tuple[common_pb2.Mode, str]:
    """The mode that a request starts in, and why it is not the one asked for."""
    if request.mode is Mode.EXTERNAL:
        return common_pb2.MODE_SPECULATIVE, ""
    if request.mode is Mode.STANDARD:
        return common_pb2.MODE_STANDARD, ""
    if request.draft_length == 0:
        return common_pb2.MODE_STANDARD, "the draft length is 0"
    if why_not != OK:
        return common_pb2.MODE_STANDARD, in_words(why_not)
    return common_pb2.MODE_SPECULATIVE, ""


def _count_time(sequence: Sequence, pass_time: float, drafted: RoundResult, proposed: bool) -> None:
    statistics = sequence.statistics
    if sequence.in_prefill:
        statistics.prefill_passes += 1
        statistics.times.prefill += pass_time
    else:
        statistics.decode_passes += 1
        statistics.times.verify += pass_time
    if sequence.request.mode in (Mode.AUTO, Mode.SPECULATIVE):
        statistics.times.draft += drafted.draft_time_s
        statistics.times.link += drafted.link_time_s
        if proposed:
            statistics.draft_passes += drafted.draft_passes
