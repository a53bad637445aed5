"""What the optimisation did to one request: counted round by round, told as the tag."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from slipstream.v1 import common_pb2


def in_words(reason: common_pb2.FallbackReason) -> str:
    """A fallback reason for people: "draft absent"."""
    name = common_pb2.FallbackReason.Name(reason)
    return name.removeprefix("FALLBACK_REASON_").lower().replace("_", " ")


@dataclass(slots=True)
class Times:
    """Wall time by step, seconds."""

    queue: float = 0.0
    prefill: float = 0.0
    draft: float = 0.0
    link: float = 0.0
    verify: float = 0.0


@dataclass(slots=True)
class Statistics:
    """Counts of one request. The identities of the tag hold after every :meth:`add_round`."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    correction: int = 0
    bonus: int = 0
    standard: int = 0
    prefill_passes: int = 0
    decode_passes: int = 0
    draft_passes: int = 0
    stale: int = 0
    fallbacks: Counter[common_pb2.FallbackReason] = field(default_factory=Counter)
    times: Times = field(default_factory=Times)

    @property
    def completion_tokens(self) -> int:
        return self.accepted + self.correction + self.bonus + self.standard

    def add_round(self, drafted: int, accepted: int, emitted: int) -> int:
        """Count a pass that emitted ``emitted`` tokens after ``accepted`` of ``drafted`` guesses stood.

        A stop may cut a round short: only guesses that were emitted count as accepted. Returns how many those are.
        """
        if drafted == 0:
            self.standard += emitted
            return 0
        kept = min(accepted, emitted)
        self.rounds += 1
        self.drafted += drafted
        self.accepted += kept
        self.histogram.extend([0] * (kept + 1 - len(self.histogram)))
        self.histogram[kept] += 1
        if emitted > kept:
            if accepted == drafted:
                self.bonus += 1
            else:
                self.correction += 1
        return kept

    def _why_standard(self, at_start: str) -> str:
        """Why a request that might have speculated never did."""
        if self.fallbacks:
            return in_words(self.fallbacks.most_common(1)[0][0])
        return at_start or "the answer ended before a round"

    def tag(
        self,
        requested: common_pb2.Mode,
        mode_reason: str,
        drafter: str,
        fingerprint: str,
        verification: common_pb2.Verification,
    ) -> common_pb2.OptimizationTag:
        """The tag. ``mode_reason`` is why the request did not start speculative; ``drafter`` and ``fingerprint`` are
        those of the draft that proposed, if one did."""
        speculative = self.rounds > 0
        passes = self.prefill_passes + self.decode_passes
        by_standard = self.prefill_passes + max(0, self.completion_tokens - 1)
        times = self.times
        return common_pb2.OptimizationTag(
            requested_mode=requested,
            active_mode=common_pb2.MODE_SPECULATIVE if speculative else common_pb2.MODE_STANDARD,
            mode_reason="" if speculative or requested == common_pb2.MODE_STANDARD else self._why_standard(mode_reason),
            quality_class=common_pb2.QUALITY_CLASS_LOSSLESS,
            drafter=drafter if speculative else "",
            drafter_fingerprint=fingerprint if speculative else "",
            num_spec_steps=self.rounds,
            num_draft_tokens=self.drafted,
            num_accepted_draft_tokens=self.accepted,
            acceptance_histogram=self.histogram,
            mean_acceptance_length=1 + self.accepted / self.rounds if self.rounds else 0.0,
            draft_acceptance_rate=self.accepted / self.drafted if self.drafted else 0.0,
            tokens_by_origin=common_pb2.TokensByOrigin(
                accepted=self.accepted, correction=self.correction, bonus=self.bonus, standard=self.standard
            ),
            target_passes=passes,
            target_passes_saved=max(0, by_standard - passes),
            draft_passes=self.draft_passes,
            time=common_pb2.TimeSplit(
                queue_ms=times.queue * 1e3,
                prefill_ms=times.prefill * 1e3,
                draft_ms=times.draft * 1e3,
                link_ms=times.link * 1e3,
                verify_ms=times.verify * 1e3,
            ),
            fallbacks=[
                common_pb2.Fallback(reason=reason, rounds=rounds) for reason, rounds in sorted(self.fallbacks.items())
            ],
            stale_proposals=self.stale,
            verification=verification,
        )
