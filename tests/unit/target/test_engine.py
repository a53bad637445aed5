"""The engine on a model that notices every mistake of bookkeeping."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator

import pytest
from slipstream.v1 import common_pb2

from services.link.round import RoundResult
from services.model.sampling import SamplingParams, Verification
from services.target.block_manager import BlockManager
from services.target.engine import Engine
from services.target.model_runner import ModelRunner
from services.target.scheduler import Scheduler
from services.target.sequence import Emitted, Event, Finished, Judged, Mode, Request, Started
from services.target.speculation import Speculation
from services.target.stopping import Finish, StopConditions
from services.target.verification import Proposal
from tests.fakes import VOCABULARY, FakeLink, FakePass, FakeStream, letter, next_logits, standard_answer

BLOCKS = 128
REQUESTED = {
    Mode.AUTO: common_pb2.MODE_AUTO,
    Mode.STANDARD: common_pb2.MODE_STANDARD,
    Mode.SPECULATIVE: common_pb2.MODE_SPECULATIVE,
    Mode.EXTERNAL: common_pb2.MODE_SPECULATIVE,
}


class Bench:
    """An engine that runs, and its parts."""

    def __init__(
        self, link: FakeLink | None, max_sequences: int = 8, prefill_rows: int = 7, blocks: int = BLOCKS
    ) -> None:
        self.link = link
        self.model = FakePass()
        self.model.allocate_cache(blocks)
        self.blocks = BlockManager(blocks)
        self.engine = Engine(
            ModelRunner(self.model),
            Scheduler(self.blocks, max_sequences, prefill_rows),
            Speculation(link, draft_length=4),
        )
        self.engine.start()

    def submit(self, request: Request) -> Answered:
        answered = Answered()
        answered.id = self.engine.submit(request, FakeStream(), answered.events.put)
        return answered


class Answered:
    """The events of one request."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.id = 0
        self.tokens: list[int] = []
        self.text = ""
        self.started: Started | None = None
        self.rounds: list[Emitted] = []

    def next(self) -> Event:
        return self.events.get(timeout=20)

    def finished(self) -> Finished:
        while True:
            match event := self.next():
                case Started():
                    self.started = event
                case Emitted():
                    self.tokens += event.tokens
                    self.text += event.text
                    self.rounds.append(event)
                case Finished():
                    return event


def request(prompt: list[int], max_tokens: int = 20, mode: Mode = Mode.SPECULATIVE, **options) -> Request:
    sampling = options.pop("sampling", SamplingParams())
    draft_length = options.pop("draft_length", 0 if mode is Mode.STANDARD else 16)
    stop = StopConditions(max_tokens, **options)
    return Request("test", tuple(prompt), sampling, stop, mode, REQUESTED[mode], draft_length)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(FakeLink())
    yield bench
    bench.engine.stop()
    assert bench.blocks.free == BLOCKS
    assert bench.engine.live == 0


def identities_hold(finished: Finished) -> None:
    tag, origin = finished.tag, finished.tag.tokens_by_origin
    histogram = list(tag.acceptance_histogram)
    assert sum(histogram) == tag.num_spec_steps
    assert sum(i * n for i, n in enumerate(histogram)) == tag.num_accepted_draft_tokens == origin.accepted
    total = origin.accepted + origin.correction + origin.bonus + origin.standard + origin.early_exit
    assert total == finished.completion_tokens


def test_greedy_answers_are_those_of_standard_decoding(bench: Bench) -> None:
    answered = bench.submit(request([1, 2, 3], 60))
    finished = answered.finished()
    assert answered.tokens == standard_answer([1, 2, 3], 60)
    assert finished.tag.num_accepted_draft_tokens > 0
    assert finished.tag.num_accepted_draft_tokens < finished.tag.num_draft_tokens
    identities_hold(finished)


@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_requests_stops_and_cancels_gives_each_its_own_answer(seed: int) -> None:
    """Random prompts, lengths, modes, stops and cancels over a small cache and few places."""
    mix = random.Random(seed)
    bench = Bench(FakeLink(right=mix.random(), seed=seed), max_sequences=mix.choice([1, 3, 8]), blocks=40)
    asked = []
    for _ in range(25):
        prompt = [mix.randrange(VOCABULARY) for _ in range(mix.randint(1, 60))]
        count = mix.randint(1, 40)
        whole = standard_answer(prompt, count)
        stop_id = mix.choice(whole) if mix.random() < 0.3 else None
        mode = mix.choice([Mode.AUTO, Mode.STANDARD, Mode.SPECULATIVE])
        ids = frozenset() if stop_id is None else frozenset([stop_id])
        answered = bench.submit(request(prompt, count, mode, token_ids=ids))
        cancelled = mix.random() < 0.2
        if cancelled:
            bench.engine.cancel(answered.id)
        expected = whole if stop_id is None else whole[: whole.index(stop_id) + 1]
        asked.append((answered, expected, cancelled))
    for answered, expected, cancelled in asked:
        finished = answered.finished()
        identities_hold(finished)
        assert finished.completion_tokens == len(answered.tokens)
        if cancelled:
            assert answered.tokens == expected[: len(answered.tokens)]
        else:
            assert answered.tokens == expected
    bench.engine.stop()
    assert bench.blocks.free == 40
    assert bench.link is not None
    assert not bench.link.told


def test_a_prompt_in_chunks_gives_the_answer_of_a_prompt_in_one(bench: Bench) -> None:
    prompt = [i % VOCABULARY for i in range(100)]
    answered = bench.submit(request(prompt, 10))
    assert answered.finished().completion_tokens == 10
    assert answered.tokens == standard_answer(prompt, 10)


@pytest.mark.parametrize("verification", list(Verification))
def test_a_seeded_answer_does_not_depend_on_neighbours(verification: Verification) -> None:
    def answer(neighbours: int) -> list[int]:
        bench = Bench(FakeLink(right=1.0, seed=1))
        others = [bench.submit(request([9, i], 30)) for i in range(neighbours)]
        sampling = SamplingParams(temperature=1.0, seed=11, verification=verification)
        answered = bench.submit(request([4, 5], 30, sampling=sampling))
        for other in (answered, *others):
            other.finished()
        bench.engine.stop()
        return answered.tokens

    assert answer(0) == answer(5)


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_coupled_sampling_is_token_identical_to_standard_decoding(right: float) -> None:
    sampling = SamplingParams(
        temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=3, verification=Verification.COUPLED
    )
    answers = []
    for mode in (Mode.STANDARD, Mode.SPECULATIVE):
        bench = Bench(FakeLink(right=right))
        answered = bench.submit(request([7, 7, 8], 40, mode, sampling=sampling))
        answered.finished()
        answers.append(answered.tokens)
        bench.engine.stop()
    assert answers[0] == answers[1]


def test_penalties_see_accepted_tokens_only(bench: Bench) -> None:
    sampling = SamplingParams(repetition_penalty=1.8)
    tokens = [3, 4]
    for _ in range(30):
        logits = next_logits(tokens).numpy().copy()
        seen = list(set(tokens))
        logits[seen] = [v / 1.8 if v > 0 else v * 1.8 for v in logits[seen]]
        tokens.append(int(logits.argmax()))
    answered = bench.submit(request([3, 4], 30, sampling=sampling))
    answered.finished()
    assert answered.tokens == tokens[2:]


def test_a_stop_string_inside_an_accepted_run_cuts_ids_text_and_counts_alike() -> None:
    bench = Bench(FakeLink(right=1.0))
    whole = standard_answer([5], 12)
    stop = letter(whole[5]) + letter(whole[6])
    answered = bench.submit(request([5], 12, strings=(stop,)))
    finished = answered.finished()
    assert finished.reason is Finish.STOP
    assert answered.tokens == whole[:7]
    assert answered.text == "".join(letter(t) for t in whole[:5])
    assert finished.completion_tokens == 7
    identities_hold(finished)
    bench.engine.stop()


def test_min_tokens_lets_no_end_token_stop_before_it(bench: Bench) -> None:
    whole = standard_answer([6], 20)
    answered = bench.submit(request([6], 20, min_tokens=20, token_ids=frozenset(whole)))
    assert answered.finished().completion_tokens == 20


def test_draft_length_zero_makes_no_draft_call(bench: Bench) -> None:
    answered = bench.submit(request([1], 10, Mode.AUTO, draft_length=0))
    assert answered.finished().tag.active_mode == common_pb2.MODE_STANDARD
    assert bench.link is not None
    assert bench.link.calls == 0


def test_standard_mode_makes_no_draft_call(bench: Bench) -> None:
    answered = bench.submit(request([1], 10, Mode.STANDARD))
    finished = answered.finished()
    assert bench.link is not None
    assert bench.link.calls == 0
    assert finished.tag.mode_reason == ""


def test_without_a_draft_the_tag_says_why() -> None:
    link = FakeLink()
    link.ready = False
    bench = Bench(link)
    answered = bench.submit(request([1], 10, Mode.AUTO))
    finished = answered.finished()
    assert answered.started is not None
    assert answered.started.mode_reason == "draft absent"
    assert finished.tag.active_mode == common_pb2.MODE_STANDARD
    assert finished.tag.mode_reason == "draft absent"
    assert finished.tag.fallbacks[0].reason == common_pb2.FALLBACK_REASON_DRAFT_ABSENT
    assert answered.tokens == standard_answer([1], 10)
    bench.engine.stop()


def test_a_draft_that_is_late_once_is_used_again(bench: Bench) -> None:
    assert bench.link is not None
    bench.link.next_result = RoundResult(reason=common_pb2.FALLBACK_REASON_DRAFT_SLOW)
    answered = bench.submit(request([1, 2], 40))
    finished = answered.finished()
    assert answered.tokens == standard_answer([1, 2], 40)
    assert [(f.reason, f.rounds) for f in finished.tag.fallbacks] == [(common_pb2.FALLBACK_REASON_DRAFT_SLOW, 1)]
    assert finished.tag.num_spec_steps > 3


def test_a_draft_that_comes_back_as_a_new_session_is_told_afresh() -> None:
    """Kill and restart in the middle of an answer: nothing is lost, and guesses are used again."""
    link = FakeLink(right=1.0, feature_layers=())
    bench = Bench(link)
    calls = iter(range(10**6))

    def break_now_and_then() -> None:
        step = next(calls)
        link.ready = step % 7 not in (3, 4)
        if step % 7 == 4:
            link.new_session()

    bench.model.fail = break_now_and_then
    answered = bench.submit(request([1, 2, 3], 80))
    finished = answered.finished()
    assert answered.tokens == standard_answer([1, 2, 3], 80)
    assert finished.tag.num_accepted_draft_tokens > 10
    assert finished.tag.fallbacks[0].rounds > 1
    identities_hold(finished)
    bench.engine.stop()


def test_beyond_the_drafts_context_a_sequence_goes_on_in_standard_decoding() -> None:
    bench = Bench(FakeLink(right=1.0))
    prompt = [i % VOCABULARY for i in range(380)]
    answered = bench.submit(request(prompt, 60))
    finished = answered.finished()
    assert answered.tokens == standard_answer(prompt, 60)
    assert common_pb2.FALLBACK_REASON_DRAFT_CONTEXT in [f.reason for f in finished.tag.fallbacks]
    bench.engine.stop()


def test_a_pass_that_fails_ends_its_requests_and_not_the_engine(bench: Bench) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    bench.model.fail = fail
    finished = bench.submit(request([1], 5)).finished()
    assert finished.reason is Finish.ERROR
    bench.model.fail = lambda: None
    answered = bench.submit(request([1], 5))
    assert answered.finished().reason is Finish.LENGTH


def test_a_callers_proposals_are_judged_as_the_targets_own_tokens(bench: Bench) -> None:
    """TargetService.Verify: right guesses are accepted, the first wrong one is corrected, callers may take their time."""
    whole = standard_answer([2, 3], 12)
    answered = bench.submit(request([2, 3], 12, Mode.EXTERNAL))
    assert isinstance(answered.next(), Started)
    first = answered.next()
    assert isinstance(first, Judged)
    assert first.verdict.token == whole[0]
    bench.engine.propose(answered.id, Proposal([whole[1], whole[2], (whole[3] + 1) % VOCABULARY]))
    judged = answered.next()
    assert isinstance(judged, Judged)
    assert (judged.verdict.accepted, judged.verdict.token, judged.committed_length) == (2, whole[3], 6)
    bench.engine.propose(answered.id, Proposal([whole[4]]))
    judged = answered.next()
    assert isinstance(judged, Judged)
    assert (judged.verdict.accepted, judged.verdict.token) == (1, whole[5])
    bench.engine.cancel(answered.id)
    assert answered.finished().reason is Finish.CANCELLED


def test_a_request_that_waits_can_be_cancelled() -> None:
    bench = Bench(FakeLink(), max_sequences=1)
    running = bench.submit(request([1], 400))
    waiting = bench.submit(request([2], 10))
    bench.engine.cancel(waiting.id)
    assert waiting.finished().completion_tokens == 0
    bench.engine.cancel(running.id)
    running.finished()
    bench.engine.stop()
    assert bench.blocks.free == BLOCKS
