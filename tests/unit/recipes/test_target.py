"""What the recipe takes from a target: its chat format, and the rows and layer that the draft starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from recipes.distil.target import ChatTokenizer, TargetWeights
from services.model.configuration import ModelConfig
from services.model.kernels.checkpoint import CheckpointError
from services.model.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}<start> {{ message['role'] }} {{ message['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% endif %}"
)
WORDS = ("<unk>", "<start>", "<end>", "user", "assistant", "hello", "there")


def chat_tokenizer() -> ChatTokenizer:
    words = FastTokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.add_special_tokens(["<start>", "<end>"])
    return ChatTokenizer(Tokenizer(words, chat_template=TEMPLATE, eos_token_ids=(2,)))


def test_a_prompt_ends_where_the_answer_starts() -> None:
    assert chat_tokenizer().prompt("hello there") == [1, 3, 5, 6, 2, 1, 4]


def test_an_opened_user_turn_ends_where_the_user_s_words_start() -> None:
    tokenizer = chat_tokenizer()
    opened = tokenizer.user_turn_opened()
    assert opened == tokenizer.prompt("hello there")[: len(opened)] == [1, 3]


def checkpoint(folder: Path, config: ModelConfig, tied: bool) -> dict[str, torch.Tensor]:
    size, wide, rows = config.hidden_size, config.intermediate_size, config.vocabulary_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (heads, size),
        "self_attn.k_proj": (kv_heads, size),
        "self_attn.v_proj": (kv_heads, size),
        "self_attn.o_proj": (size, heads),
        "mlp.gate_proj": (wide, size),
        "mlp.up_proj": (wide, size),
        "mlp.down_proj": (size, wide),
        "input_layernorm": (size,),
        "post_attention_layernorm": (size,),
    }
    torch.manual_seed(0)
    state = {
        f"model.layers.{layer}.{name}.weight": torch.randn(shape)
        for layer in range(config.num_layers)
        for name, shape in shapes.items()
    }
    state |= {"model.embed_tokens.weight": torch.randn(rows, size), "model.norm.weight": torch.randn(size)}
    if not tied:
        state["lm_head.weight"] = torch.randn(rows, size)
    save_file(state, folder / "model.safetensors")
    return state


@pytest.mark.parametrize("tied", [True, False])
def test_the_last_layer_and_the_head_are_read(tmp_path: Path, tied: bool) -> None:
    config = ModelConfig("LlamaForCausalLM", 40, 32, 3, 4, 2, 8, 64, 1e-5, 64, tied_embeddings=tied)
    state = checkpoint(tmp_path, config, tied)
    weights = TargetWeights.read(tmp_path, config)
    head = state["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.equal(weights.head, head.bfloat16())
    assert torch.equal(weights.norm, state["model.norm.weight"])
    assert torch.equal(weights.last_layer["mlp.up_proj.weight"], state["model.layers.2.mlp.up_proj.weight"])


def test_a_target_that_is_not_llama_like_is_refused(tmp_path: Path) -> None:
    config = ModelConfig("LlamaForCausalLM", 40, 32, 3, 4, 2, 8, 64, 1e-5, 64)
    save_file({"transformer.wte.weight": torch.zeros(40, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens"):
        TargetWeights.read(tmp_path, config)
