"""Tiny random models and tokenizers, made on the spot: as folders that transformers writes, and as GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from services.model.kernels.checkpoint import gguf_name

TEXTS = ["the quick brown fox jumps over the lazy dog", "naïve café 世界 🧑‍🚀 🎉", "def f(x):\n    return x + 1\n"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
WIDE = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2}
VOCABULARY = 320


def byte_level() -> Tokenizer:
    """Like those of Llama 3, Qwen and SmolLM."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|turn|>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("naïve😀", normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like those of Llama 2 and Mistral: words with a leading mark, unknown characters as bytes."""
    words = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer | None = None, template: str | None = CHAT_TEMPLATE) -> Any:
    """Write a tokenizer as transformers does; returns transformers' own."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer or byte_level(), eos_token="<|end|>", bos_token="<|turn|>"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


_GPT2 = {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 128}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**WIDE, "rms_norm_eps": 1e-5}),
    "mistral": ("MistralConfig", {**WIDE, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", WIDE),
    "qwen3": ("Qwen3Config", {**WIDE, "head_dim": 32}),
    "gpt2": ("GPT2Config", _GPT2),
    "gemma2": ("Gemma2Config", {**WIDE, "head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 5.0}),
    "mixtral": ("MixtralConfig", {**WIDE, "num_local_experts": 4}),
    "bloom": ("BloomConfig", {"n_layer": 3, "hidden_size": 64, "n_head": 4}),
    "mamba": ("MambaConfig", {"num_hidden_layers": 3, "hidden_size": 64}),
}


def configuration(kind: str, **changes: Any) -> Any:
    name, own = KINDS[kind]
    common = {"vocab_size": VOCABULARY, "eos_token_id": 0, "bos_token_id": 1, "pad_token_id": None}
    return getattr(transformers, name)(**{**common, **own, **changes})


def model(kind: str, **changes: Any) -> Any:
    """A random model in float32, with weights large enough that its answers differ by context."""
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(configuration(kind, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return made


def save_model(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """A whole model folder."""
    model(kind, **changes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_gguf(path: Path, kind: str = "Q8_0", **changes: Any) -> Path:
    """A Llama in GGUF, with the byte-level tokenizer."""
    import gguf

    made = model("llama", **changes)
    config, tokenizer = made.config, byte_level()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("toy")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    for name, tensor in made.state_dict().items():
        values = _for_llama_cpp(name, tensor, config).numpy()
        stored = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, size: int) -> None:
    tokens = [tokenizer.id_to_token(i) or f"<pad{i}>" for i in range(size)]
    special = {"<|end|>", "<|turn|>"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def _for_llama_cpp(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp interleaves the two halves of each query and key head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor.contiguous()
    rows, columns = tensor.shape
    return tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()
