"""The target's end of the link: one session after another with the draft, for as long as the target lives.

A thread of its own connects, attaches and receives; the engine's thread calls :meth:`DraftLink.propose` and waits for
the answer no longer than a round may take. Whatever the draft does, propose returns.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import structlog
from slipstream.v1 import common_pb2, draft_pb2

from services.link import metrics
from services.link.answers import read_answer
from services.link.arena import ArenaError
from services.link.pairing import AttachError
from services.link.round import OK, ContextUpdate, LinkState, RoundError, RoundResult
from services.link.session import Offer, Session, attach
from services.link.tensors import TensorError

log = structlog.get_logger()

CONNECT_PAUSE_S = (0.1, 0.5)
"""Between attempts to reach a draft that is not there: first and longest, doubled each time, with jitter."""
TROUBLE_PAUSE_S = (0.5, 8.0)
"""After a session that ended in trouble (slow, wrong, failing), doubled until one goes well: each costs its users some
budgets."""
REFUSED_PAUSE_S = 5.0
"""After a draft that does not fit: another one may be put in its place."""
BREACHES = 3
"""Rounds in a row over budget that end a session."""
HUNG_AFTER_S = 3.0
"""A round that is not answered for so long ends the session."""
PROVEN_ROUNDS = 16
"""Rounds answered in time after which a session counts as a good one."""
MOST_PASSES = 1024
"""Of a round, that a draft is believed to have run: the counts they are added to must not overflow."""
MESSAGE_BYTES = 64 * 1024 * 1024
"""Room for tensors that ride inline."""

_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # The pauses are this module's: a new channel must not inherit the back-off of the one before.
    ("grpc.use_local_subchannel_pool", 1),
]
_SLOW = common_pb2.FALLBACK_REASON_DRAFT_SLOW
_INVALID = common_pb2.FALLBACK_REASON_DRAFT_INVALID
_LOST = common_pb2.FALLBACK_REASON_DRAFT_LOST
_ABSENT = common_pb2.FALLBACK_REASON_DRAFT_ABSENT


class DraftLink:
    """The engine's view of the draft. ``propose`` and ``release`` belong to the engine's thread.

    No method raises for a bad draft.
    """

    def __init__(
        self,
        address: str,
        target: common_pb2.ModelInfo,
        hidden_size: int,
        budget_s: float,
        shared_memory: Path | None,
        num_layers: int | None = None,
    ) -> None:
        """``address`` is the draft's gRPC address, ``budget_s`` how long a round may take, ``shared_memory`` the agreed
        folder for arenas (None: tensors ride inline), ``num_layers`` the target's, for drafts that are fed with their
        outputs (None: not checked)."""
        usable = shared_memory is not None and os.access(shared_memory, os.R_OK | os.W_OK)
        self._address = address
        self._offer = Offer(target, hidden_size, shared_memory if usable else None, num_layers)
        self._budget_s = budget_s
        self._session: Session | None = None
        self._channel: grpc.Channel | None = None
        self._reason: common_pb2.FallbackReason = _ABSENT
        self._trouble_pause = TROUBLE_PAUSE_S[0]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_connected, name="link", daemon=True)

    def start(self) -> None:
        """Begin to connect, and to reconnect whenever a session ends."""
        self._thread.start()

    def close(self) -> None:
        """End the session for good. Idempotent."""
        self._closing.set()
        session, channel = self._session, self._channel
        if session is not None:
            session.close()
        if channel is not None:
            channel.close()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    @property
    def state(self) -> LinkState:
        """May be read from any thread."""
        session = self._session
        if session is None:
            return LinkState(False, self._reason)
        return LinkState(True, OK, session.number, session.info, session.columns)

    def propose(self, updates: Sequence[ContextUpdate], session_number: int | None = None) -> RoundResult:
        """One round: what the draft guessed, or the reason why it did not, within the budget.

        A round that asks for no guesses is handed over without waiting. What could not be handed over, because an
        earlier round is still on its way, is kept and goes with the next round. With ``session_number``, that of the
        state which the updates were made for, a round for a session that has been replaced since is not sent.
        """
        session = self._session
        if session is None:
            return RoundResult(reason=self._reason)
        if session_number is not None and session.number != session_number:
            return RoundResult(reason=_LOST)
        started = time.monotonic()
        try:
            return self._round(session, updates, started)
        except (EOFError, ArenaError):
            reason, outcome = _LOST, "lost"
            self._drop(session, session.failure, "stream ended")
        except (RoundError, TensorError) as error:
            reason, outcome = _INVALID, "invalid"
            self._drop(session, _INVALID, str(error))
        if _asked(updates):
            metrics.ROUNDS.labels(outcome).inc()
        return RoundResult(reason=reason, link_time_s=time.monotonic() - started)

    def release(self, sequence_ids: Sequence[int]) -> None:
        """Let the draft forget sequences; does not wait."""
        session = self._session
        if session is not None and sequence_ids:
            session.release(sequence_ids)

    # --- a round ---

    def _round(self, session: Session, updates: Sequence[ContextUpdate], started: float) -> RoundResult:
        deadline = started + self._budget_s
        late = self._settle(session, deadline)
        for update in updates:
            earlier = session.untold.get(update.sequence_id)
            session.untold[update.sequence_id] = update if earlier is None else earlier.then(update)
        if session.outstanding is not None:
            return self._slow(session, updates, late, started)
        whole = [session.untold.pop(update.sequence_id) for update in updates]
        session.send(whole)
        if not _asked(updates):
            return _accounted(late, started)
        answer = session.receive(deadline - time.monotonic())
        if answer is None:
            return self._breach(session, updates, late, started)
        drafts, stale = read_answer(answer, whole, session)
        session.breaches, session.answered = 0, session.answered + 1
        metrics.ROUNDS.labels("answered").inc()
        return _accounted([*late, answer], started, drafts=drafts, stale=_stale(late) + stale)

    def _settle(self, session: Session, deadline: float) -> list[draft_pb2.Proposal]:
        """Take in the answer to an earlier round: its guesses, if it was asked for any, come too late.

        One that only told the draft something is waited for; one that broke its budget cost a wait already.
        """
        outstanding = session.outstanding
        if outstanding is None:
            return []
        answer = session.receive(0.0 if outstanding.given_up else deadline - time.monotonic())
        if answer is None:
            outstanding.given_up = True
            return []
        return [answer]

    def _breach(
        self, session: Session, updates: Sequence[ContextUpdate], late: list[draft_pb2.Proposal], started: float
    ) -> RoundResult:
        """The budget ran out in this round."""
        assert session.outstanding is not None
        session.outstanding.given_up = True
        session.breaches += 1
        if session.breaches >= BREACHES:
            self._drop(session, _SLOW, f"{BREACHES} rounds in a row took longer than their budget")
        return self._slow(session, updates, late, started)

    def _slow(
        self, session: Session, updates: Sequence[ContextUpdate], late: list[draft_pb2.Proposal], started: float
    ) -> RoundResult:
        """An answer is missing. That is a breach only to those who asked for guesses."""
        assert session.outstanding is not None
        if time.monotonic() - session.outstanding.since > HUNG_AFTER_S:
            self._drop(session, _SLOW, "a round was not answered for too long")
        if not _asked(updates):
            return _accounted(late, started)
        metrics.ROUNDS.labels("slow").inc()
        return _accounted(late, started, reason=_SLOW, stale=_stale(late))

    def _drop(self, session: Session, reason: common_pb2.FallbackReason, detail: str) -> None:
        """This session is over; the link's thread opens the next one."""
        if self._session is session:
            session.failure = reason
            self._reason = reason
            self._session = None
            log.warning("draft lost", session=session.number, reason=_name(reason), detail=detail)
        session.close()

    # --- the link's own thread ---

    def _keep_connected(self) -> None:
        connect_pause = CONNECT_PAUSE_S[0]
        while not self._closing.is_set():
            pause = connect_pause
            connect_pause = min(2 * connect_pause, CONNECT_PAUSE_S[1])
            try:
                pause = self._one_session()
                connect_pause = CONNECT_PAUSE_S[0]
            except AttachError as error:
                if self._reason != error.reason:
                    log.error("draft refused", detail=str(error), reason=_name(error.reason))
                self._reason = error.reason
                pause = REFUSED_PAUSE_S
            except grpc.RpcError as error:
                hung = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                self._reason = _SLOW if hung else _ABSENT
            except Exception as error:  # A draft may send anything; the link must outlive it.
                self._reason = _INVALID
                log.error("session failed", error=type(error).__name__, detail=str(error)[:200])
                pause = REFUSED_PAUSE_S
            self._closing.wait(pause * random.uniform(0.8, 1.2))

    def _one_session(self) -> float:
        """Attach and receive until the stream ends. Returns how long to wait before the next."""
        with grpc.insecure_channel(self._address, options=_CHANNEL_OPTIONS) as channel:
            self._channel = channel
            if self._closing.is_set():
                return 0.0
            session = attach(channel, self._offer)
            metrics.SESSIONS.inc()
            log.info(
                "draft attached",
                session=session.number,
                drafter=session.info.drafters[0] if session.info.drafters else "",
                draft=session.info.model.model_id,
                shared_memory=session.shared_memory,
            )
            self._session = session
            try:
                session.receive_all()
            finally:
                if self._session is session:
                    self._reason, self._session = session.failure, None
                    if not self._closing.is_set():
                        log.warning(
                            "draft lost", session=session.number, reason=_name(session.failure), detail="stream ended"
                        )
                session.close()
        metrics.ENDS.labels(_name(session.failure)).inc()
        return self._pause_after(session)

    def _pause_after(self, session: Session) -> float:
        if session.answered >= PROVEN_ROUNDS:
            self._trouble_pause = TROUBLE_PAUSE_S[0]
        if session.failure == _ABSENT:
            return CONNECT_PAUSE_S[0]
        pause = self._trouble_pause
        self._trouble_pause = min(2 * pause, TROUBLE_PAUSE_S[1])
        return pause


def _asked(updates: Sequence[ContextUpdate]) -> bool:
    return any(update.draft_length for update in updates)


def _accounted(taken: list[draft_pb2.Proposal], started: float, **rest: Any) -> RoundResult:
    """The result of a round, with the time and the passes of the answers that were taken in."""
    waited = time.monotonic() - started
    computing = min(sum(answer.draft_time_us for answer in taken) / 1e6, waited)
    passes = sum(min(max(answer.draft_passes, 0), MOST_PASSES) for answer in taken)
    return RoundResult(draft_time_s=computing, link_time_s=waited - computing, draft_passes=passes, **rest)


def _stale(late: list[draft_pb2.Proposal]) -> int:
    return sum(1 for answer in late for sequence in answer.sequences if sequence.tokens)


def _name(reason: common_pb2.FallbackReason) -> str:
    return common_pb2.FallbackReason.Name(reason).removeprefix("FALLBACK_REASON_").lower()
