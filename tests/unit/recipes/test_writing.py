"""The target writes the training text: same noise whatever rides beside, shards that survive a kill, a fixed split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.distil import corpus, prompts
from recipes.distil.corpus import Corpus, CorpusPlan
from recipes.distil.generation import Generator, Job, Written, choose
from recipes.distil.unseen import UNSEEN
from services.model.forward import PassOutput, SequenceRows

END = 0


class ToyPass:
    """A target whose logits depend on the last two tokens; states tell token and place."""

    vocabulary_size, hidden_size, num_layers, context_limit = 12, 4, 3, 64
    compute_path = compute_path_reason = weight_format = "toy"
    cache_bytes_per_block = 0

    def __init__(self) -> None:
        self.passes = 0
        self.table = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)) * 2

    def allocate_cache(self, num_blocks: int) -> None:
        self.blocks = num_blocks

    def run(self, batch: Sequence[SequenceRows], feature_layers: Sequence[int] = ()) -> PassOutput:
        self.passes += 1
        assert len({block for rows in batch for block in rows.blocks}) == sum(len(rows.blocks) for rows in batch)
        logits = torch.stack([self.table[rows.tokens[-1]] + rows.base * 0.01 for rows in batch])
        states = [[token, rows.base + i] for rows in batch for i, token in enumerate(rows.tokens)]
        features = torch.tensor(states).bfloat16().unsqueeze(1).expand(-1, len(feature_layers), -1)
        return PassOutput(logits, features if feature_layers else None)

    def keep(self, rows: SequenceRows, path: Sequence[int]) -> None:
        raise AssertionError("a chain keeps nothing")


def jobs(count: int) -> list[Job]:
    return [Job(i, (1 + i % 11, 2, 3), 12, (0.0, 1.0)[i % 2], seed=5) for i in range(count)]


def generator(slots: int) -> Generator:
    return Generator(ToyPass(), slots, 20, frozenset([END]), (1, 3))


def test_a_sequence_is_the_same_whatever_rides_beside_it() -> None:
    alone = {written.job.index: written.tokens for written in generator(1).write(jobs(9))}
    together = {written.job.index: written.tokens for written in generator(6).write(jobs(9))}
    assert alone == together
    assert len(alone) == 9


def test_states_belong_to_the_tokens_they_are_stored_with() -> None:
    for written in generator(4).write(jobs(6)):
        assert written.features is not None
        assert written.features.shape[:2] == (len(written.tokens) - 1, 2)
        assert written.features[:, 0, 0].tolist() == list(written.tokens[:-1])
        assert written.features[:, 1, 1].tolist() == list(range(len(written.tokens) - 1))


def test_a_sequence_ends_at_its_end_token_or_limit() -> None:
    for written in generator(4).write(jobs(11)):
        new = written.tokens[3:]
        assert END not in new[:-1]
        assert new[-1] == END or len(new) == 12


def test_a_prompt_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt of 20 tokens"):
        list(generator(1).write([Job(0, (1,) * 20, 4, 0.0, 0)]))


def test_sampling_by_inversion_has_the_distribution_of_its_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    count = 4000
    noise = (torch.arange(count) + 0.5) / count
    chosen = choose(logits.expand(count, -1), torch.full((count,), 0.7), noise)
    shares = torch.bincount(chosen, minlength=4) / count
    torch.testing.assert_close(shares, (logits / 0.7).softmax(-1), atol=1e-3, rtol=0)


def ignore(sequences: int, tokens: int) -> None:
    pass


def test_a_killed_corpus_is_finished_with_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "SHARD_SEQUENCES", 4)
    corpus.write(tmp_path / "whole", generator(3), jobs(10), ignore)

    class Killed(Exception):
        pass

    def killed_late(sequences: int, tokens: int) -> None:
        killed_late.left -= 1  # type: ignore[attr-defined]
        if killed_late.left == 0:  # type: ignore[attr-defined]
            raise Killed

    killed_late.left = 8  # type: ignore[attr-defined]
    with pytest.raises(Killed):
        corpus.write(tmp_path / "cut", generator(3), jobs(10), killed_late)
    kept = sorted(tmp_path.glob("cut/shard-*"))
    assert 0 < len(kept) < 3
    before = [path.stat().st_mtime_ns for path in kept]
    corpus.write(tmp_path / "cut", generator(5), jobs(10), ignore)
    assert [path.stat().st_mtime_ns for path in kept] == before
    whole, cut = Corpus(tmp_path / "whole"), Corpus(tmp_path / "cut")
    assert whole.fingerprint() == cut.fingerprint()
    assert len(cut.sequences) == 10
    assert cut.num_tokens == whole.num_tokens


def test_what_is_read_back_is_what_was_written(tmp_path: Path) -> None:
    corpus.write(tmp_path, generator(3), jobs(5), ignore)
    read = Corpus(tmp_path)
    written = sorted(generator(3).write(jobs(5)), key=lambda one: one.job.index)
    for sequence, one in zip(read.sequences, written, strict=True):
        assert read.tokens(sequence).tolist() == list(one.tokens[:-1])
        assert one.features is not None
        assert torch.equal(read.features(sequence), one.features)
        assert sequence.prompt == 3
        assert sequence.greedy == (one.job.temperature == 0)


def test_the_plan_gives_its_share_of_greedy_text() -> None:
    plan = CorpusPlan(seed=0, greedy_share=0.6)
    temperatures = [plan.temperature(i) for i in range(500)]
    assert temperatures.count(0.0) == pytest.approx(300, abs=5)
    assert set(temperatures) == {0.0, *plan.temperatures}


def test_written_instructions_are_varied_and_repeatable() -> None:
    first, second = list(islice(prompts.written(1), 400)), list(islice(prompts.written(1), 400))
    assert first == second
    assert len(set(first)) > 300
    assert not any("{" in text for text in first)


def test_the_held_out_split_hangs_on_the_text_alone() -> None:
    texts = list(islice(prompts.written(2), 2000))
    held = {text for text in texts if prompts.is_held_out(text)}
    assert 0.01 < len(held) / len(set(texts)) < 0.09
    assert all(prompts.is_held_out(f"  {text.upper()} ") for text in held)


class OneTurn:
    """Writes the same user turn again and again, with a number."""

    end_tokens = frozenset([END])

    def write(self, todo: Iterator[Job]) -> Iterator[Written]:
        for job in todo:
            yield Written(job, (*job.tokens, 100 + job.index, END), None)


class Numbers:
    def user_turn_opened(self) -> list[int]:
        return [1]

    def decode(self, tokens: Sequence[int]) -> str:
        return f"sampled turn {tokens[0]}"


@pytest.mark.parametrize("share", [0.0, 0.5, 0.75, 1.0])
def test_prompts_are_sampled_and_written_in_the_share_asked_for(tmp_path: Path, share: float) -> None:
    stand_ins: Any = (OneTurn(), Numbers())
    path = tmp_path / "prompts.jsonl"
    made = prompts.make(path, *stand_ins, count=80, sampled_share=share, seed=1)
    assert len({prompt.text for prompt in made}) == 80
    assert sum(prompt.text.startswith("sampled turn") for prompt in made) == pytest.approx(80 * share, abs=4)
    assert made == prompts.make(path, *stand_ins, count=80, sampled_share=0.1, seed=2), "made once, then kept"


def test_no_unseen_question_can_be_made_by_the_grammar() -> None:
    made = {" ".join(text.lower().split()) for text in islice(prompts.written(3), 20000)}
    assert not made & {question.lower() for question in UNSEEN}
