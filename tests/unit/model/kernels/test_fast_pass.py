"""The fast pass is faithful to its reference and to transformers, and row-invariant bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.model.configuration import ModelConfig
from services.model.forward import BLOCK_SIZE, SequenceRows
from services.model.kernels import build, torch_pass
from services.model.kernels.fast import FastPass, blocks_for
from services.model.kernels.packed_model import PackedLayer, PackedModel
from services.model.kernels.packing import Packed, pack
from tests.unit.model.kernels.test_packing import eight_bit, four_bit

pytestmark = pytest.mark.skipif(build.why_not_here() is not None, reason=f"no fast pass here: {build.why_not_here()}")

CONTEXT = 400
CONFIG = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 200,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 160,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
)


def random_layer(seed: int, with_bias: bool, with_head_norms: bool) -> PackedLayer:
    generator = torch.Generator().manual_seed(seed)

    def vector(size: int, mean: float) -> torch.Tensor:
        return mean + 0.1 * torch.randn(size, generator=generator)

    return PackedLayer(
        norms=(vector(96, 1), vector(96, 1)),
        maps=(
            pack(four_bit(320, 96, seed)),
            pack(eight_bit(96, 192, seed)),
            pack(four_bit(320, 96, seed + 1)),
            pack(four_bit(96, 160, seed + 2)),
        ),
        qkv_bias=vector(320, 0) if with_bias else None,
        head_norms=(vector(32, 1), vector(32, 1)) if with_head_norms else None,
    )


class Example:
    """A random two-layer model, in C++ and in torch."""

    def __init__(self, threads: int, with_bias: bool = True, with_head_norms: bool = True) -> None:
        self.layers = [random_layer(10 * i, with_bias, with_head_norms) for i in range(2)]
        self.head: Packed = pack(eight_bit(200, 96, 7))
        self.norm = torch.linspace(0.5, 1.5, 96)
        self.fast = FastPass(CONFIG, threads)
        for layer in self.layers:
            self.fast.add_layer(layer)
        self.fast.set_head(self.norm, self.head, 200)
        self.fast.set_embedding_rows(self.head)
        self.fast.allocate_cache(64)

    def reference(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        """Logits of all rows of one tree that starts at the beginning of the context."""
        depth = [0] * len(tokens)
        for row, parent in enumerate(parents):
            depth[row] = 0 if parent < 0 else depth[parent] + 1
        cosines, sines = (table.float()[depth] for table in CONFIG.rope_tables(CONTEXT))
        places = [torch_pass.ancestors(0, parents, row) for row in range(len(tokens))]
        x = torch_pass.unpack(self.head).dequantise()[tokens]
        for layer in self.layers:
            normed = torch_pass.rms_norm(x, layer.norms[0], CONFIG.norm_eps)
            heads = torch_pass.linear(layer.maps[0], normed, layer.qkv_bias).view(len(tokens), 10, 32)
            queries, keys, values = heads.split([6, 2, 2], 1)
            if layer.head_norms is not None:
                queries = torch_pass.rms_norm(queries, layer.head_norms[0], CONFIG.norm_eps)
                keys = torch_pass.rms_norm(keys, layer.head_norms[1], CONFIG.norm_eps)
            queries, keys = (torch_pass.rotate(t, cosines, sines) for t in (queries, keys))
            mixed = torch_pass.attention(queries, keys, values, places).flatten(1)
            x = x + torch_pass.linear(layer.maps[1], mixed)
            normed = torch_pass.rms_norm(x, layer.norms[1], CONFIG.norm_eps)
            x = x + torch_pass.linear(layer.maps[3], torch_pass.gated(layer.maps[2], normed))
        return torch_pass.linear(self.head, torch_pass.rms_norm(x, self.norm, CONFIG.norm_eps))[:, :200]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for activations that round the other way, which move later rows by a few thousandths of the spread."""
    error = (found - expected).abs()
    assert error[:2].max() < 1e-3
    assert error.mean() < 0.01 * expected.std()


@pytest.fixture(scope="module")
def example() -> Example:
    return Example(threads=2)


@pytest.fixture(scope="module")
def alone() -> Example:
    return Example(threads=1)


@pytest.mark.parametrize(("with_bias", "with_head_norms"), [(False, False), (True, False), (False, True)])
def test_logits_are_those_of_the_torch_reference(with_bias: bool, with_head_norms: bool) -> None:
    example = Example(2, with_bias, with_head_norms)
    tokens = [(7 * i) % 200 for i in range(40)]
    parents = list(range(-1, 39))
    found = example.fast.run([SequenceRows(tokens, 0, range(blocks_for(40)), 40)]).logits
    assert_close(found, example.reference(tokens, parents))


def test_a_tree_is_that_of_the_torch_reference(example: Example) -> None:
    tokens, parents = [5, 9, 13, 5, 77, 120, 3, 8], [-1, -1, 0, 0, 1, 4, 2, 6]
    found = example.fast.run([SequenceRows(tokens, 0, [3], 8, parents)]).logits
    assert_close(found, example.reference(tokens, parents))


class Mix(random.Random):
    """Draws chunks, neighbours, blocks and trees for the property below."""

    def blocks(self, tokens: int, among: list[int]) -> list[int]:
        chosen = self.sample(among, blocks_for(tokens))
        for block in chosen:
            among.remove(block)
        return chosen

    def neighbour(self, among: list[int]) -> SequenceRows:
        count = self.randint(1, 20)
        return SequenceRows([self.randrange(200) for _ in range(count)], 0, self.blocks(count, among), count)

    def tree_around(self, path: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Tokens and parents of a tree that holds ``path`` among other branches, and the rows of the path."""
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[int] = []
        for token in path:
            for _ in range(self.randint(0, 2)):
                tokens.append(self.randrange(200))
                parents.append(self.randrange(-1, len(tokens) - 1))
            parents.append(rows[-1] if rows else -1)
            rows.append(len(tokens))
            tokens.append(token)
        return tokens, parents, rows


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), length=st.integers(2, 90), threads=st.sampled_from([1, 2]))
def test_a_rows_bits_depend_on_that_row_and_its_context_alone(
    example: Example, alone: Example, seed: int, length: int, threads: int
) -> None:
    """Any chunking, neighbours, place in chain or tree, place in the cache, number of threads: the same bits."""
    mix = Mix(seed)
    tokens = [mix.randrange(200) for _ in range(length)]
    expected = alone.fast.run([SequenceRows(tokens, 0, range(blocks_for(length)), length)], (0, 1, 2))
    model = (alone if threads == 1 else example).fast
    model.allocate_cache(64)
    free = list(range(64))
    blocks = mix.blocks(length + 32, free)
    done = 0
    while done < length:
        chunk = tokens[done : done + mix.randint(1, 12)]
        before = [mix.neighbour(free) for _ in range(mix.randint(0, 2))]
        in_tree = mix.random() < 0.5
        rows_tokens, parents, path = mix.tree_around(chunk) if in_tree else (chunk, None, list(range(len(chunk))))
        rows = SequenceRows(rows_tokens, done, blocks, len(rows_tokens), parents)
        output = model.run([*before, rows, *[mix.neighbour(free) for _ in range(mix.randint(0, 1))]], (0, 1, 2))
        assert output.features is not None
        assert expected.features is not None
        first = sum(len(b.tokens) for b in before)
        at = [first + row for row in path]
        assert torch.equal(output.logits[at], expected.logits[done : done + len(chunk)])
        assert torch.equal(output.features[at], expected.features[done : done + len(chunk)])
        if in_tree:
            model.keep(rows, path)
        done += len(chunk)
        free = [b for b in range(64) if b not in blocks]


def test_a_pass_can_stop_at_a_layer_and_go_on_from_there(example: Example) -> None:
    tokens = list(range(20))
    whole = example.fast.run([SequenceRows(tokens, 0, [0, 1], 20)]).logits
    rows = [SequenceRows(tokens, 0, [2, 3], 0)]
    _, _, hidden = example.fast.run_layers(rows, last_layer=1, want_hidden=True)
    resumed, _, _ = example.fast.run_layers([SequenceRows(tokens, 0, [2, 3], 20)], inputs=hidden, first_layer=1)
    assert torch.equal(resumed, whole)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (SequenceRows([200], 0, [0]), "outside the vocabulary"),
        (SequenceRows([-1], 0, [0]), "outside the vocabulary"),
        (SequenceRows([1], BLOCK_SIZE, [0]), "outside its block table"),
        (SequenceRows([1], 0, [64]), "outside the cache"),
        (SequenceRows([1], CONTEXT, list(range(26))), "outside the context"),
        (SequenceRows([1, 2], 0, [0], 1, [-1, 1]), "follow an earlier row"),
        (SequenceRows([], 0, [0], 0), "needs a row"),
    ],
)
def test_rows_that_point_outside_are_refused(example: Example, rows: SequenceRows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        example.fast.run([rows])


def test_a_packed_file_gives_the_same_model(tmp_path: Path) -> None:
    example = Example(threads=1)
    packed = PackedModel(example.layers, example.norm, example.head, None, "int8")
    packed.save(tmp_path / "packed.safetensors")
    again = FastPass.load(tmp_path, CONFIG, threads=1, packed=tmp_path / "packed.safetensors")
    again.allocate_cache(4)
    rows = [SequenceRows(list(range(20)), 0, [0, 1], 20)]
    assert torch.equal(again.run(rows).logits, example.fast.run(rows).logits)
