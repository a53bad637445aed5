"""What is kept of one request, however it ends: counted as the tokens pass by, told as a usage record.

The target's own tag comes with its last message. A stream that does not get that far (cancelled, past its deadline, a
target that died) is told by what the caller was sent: the same counts, from the same chunks, the last of which may
still have been on its way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import grpc
import structlog
from google.protobuf import json_format
from slipstream.v1 import common_pb2, target_pb2

log = structlog.get_logger()


@dataclass
class Record:
    """One request at the gateway."""

    request_id: str
    requested_mode: common_pb2.Mode
    arrived: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    waited_s: float = 0.0
    """In the gateway's queue."""
    started_s: float = 0.0
    """When the target's first message came; like the next two, seconds after the arrival."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    started: target_pb2.Started | None = None
    finished: target_pb2.Finished | None = None
    delivered: common_pb2.OptimizationTag = field(default_factory=common_pb2.OptimizationTag)
    """Counts of what was sent so far."""
    tokens: int = 0

    def start(self, started: target_pb2.Started) -> None:
        self.started = started
        self.started_s = self.seconds

    def finish(self, finished: target_pb2.Finished) -> None:
        """Take the target's own account over, and add the gateway's time to it."""
        self.finished = finished
        times = finished.tag.time
        target_ms = times.prefill_ms + times.draft_ms + times.link_ms + times.verify_ms
        times.stream_ms = max(0.0, (self.seconds - self.started_s) * 1e3 - target_ms)
        times.queue_ms += self.waited_s * 1e3

    def add(self, chunk: target_pb2.Chunk) -> None:
        """Count the tokens of one round."""
        self.last_token_s = self.seconds
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
        count, accepted, tag = len(chunk.token_ids), chunk.num_accepted_draft_tokens, self.delivered
        self.tokens += count
        tag.target_passes += 1
        if chunk.num_draft_tokens == 0:
            tag.tokens_by_origin.standard += count
            return
        tag.num_spec_steps += 1
        tag.num_draft_tokens += chunk.num_draft_tokens
        tag.num_accepted_draft_tokens += accepted
        tag.acceptance_histogram.extend([0] * (accepted + 1 - len(tag.acceptance_histogram)))
        tag.acceptance_histogram[accepted] += 1
        tag.tokens_by_origin.accepted += accepted
        if accepted == chunk.num_draft_tokens:
            tag.tokens_by_origin.bonus += count - accepted
        else:
            tag.tokens_by_origin.correction += count - accepted

    @property
    def seconds(self) -> float:
        """Since the request arrived."""
        return time.perf_counter() - self.clock

    def usage(self) -> common_pb2.Usage:
        if self.finished is not None:
            return self.finished.usage
        prompt = 0 if self.started is None else self.started.prompt_tokens
        return common_pb2.Usage(prompt_tokens=prompt, completion_tokens=self.tokens)

    def tag(self) -> common_pb2.OptimizationTag:
        """The target's tag, or what is known of a stream that did not reach it. No active mode: it never started."""
        if self.finished is not None:
            return self.finished.tag
        tag = common_pb2.OptimizationTag()
        tag.CopyFrom(self.delivered)
        tag.requested_mode = self.requested_mode
        tag.time.queue_ms = self.waited_s * 1e3
        if self.started is None:
            return tag
        tag.active_mode = common_pb2.MODE_SPECULATIVE if tag.num_spec_steps else common_pb2.MODE_STANDARD
        tag.quality_class = common_pb2.QUALITY_CLASS_LOSSLESS
        if tag.num_spec_steps:
            tag.mean_acceptance_length = 1 + tag.num_accepted_draft_tokens / tag.num_spec_steps
            tag.draft_acceptance_rate = tag.num_accepted_draft_tokens / tag.num_draft_tokens
            tag.target_passes_saved = max(0, self.tokens - tag.target_passes)
        elif self.requested_mode != common_pb2.MODE_STANDARD:
            tag.mode_reason = self.started.mode_reason or "the answer ended before a round"
        return tag

    def close(self, reason: common_pb2.FinishReason, status: grpc.StatusCode) -> None:
        """Write the usage record: one line of the log, without text of prompt or answer."""
        usage, tag = self.usage(), self.tag()
        log.info(
            "usage",
            request_id=self.request_id,
            finish_reason=finish_word(reason),
            status=status.name,
            arrived_at=round(self.arrived, 3),
            seconds=round(self.seconds, 4),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            tag=json_format.MessageToDict(tag, preserving_proto_field_name=True),
        )


def finish_word(reason: common_pb2.FinishReason) -> str:
    return common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def mode_word(mode: common_pb2.Mode) -> str:
    return common_pb2.Mode.Name(mode).removeprefix("MODE_").lower()
