"""``python -m bench.floors``: the floors of the first version, measured on a running system (``make serve``).

Standard decoding against ``transformers.generate`` in bf16 on the same model, speculative against standard, and what a
round costs besides the models' time. Runs are interleaved and medians are told; run nothing else meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from cli.generate import build_request, stream

PROMPTS = (
    "Name five rivers in Africa and say one thing about each.",
    "Write a Python function that reverses a list, and explain it.",
    "Explain photosynthesis to a child.",
    "Write a short story about a lighthouse keeper.",
)
TOKENS = 128
ROUNDS = 3
ADDRESS = os.environ.get("SLIPSTREAM_ADDRESS", "127.0.0.1:50050")


def served(mode: str) -> Callable[[str], tuple[int, float, dict[str, float]]]:
    """A run through the gateway: tokens, seconds, and milliseconds by step with the count of rounds."""

    def run(prompt: str) -> tuple[int, float, dict[str, float]]:
        request = build_request(prompt, mode=mode, max_tokens=TOKENS, temperature=0)
        started = time.perf_counter()
        answer = stream(request, ADDRESS, timeout=120, show=False)
        tag = answer["tag"]
        rounds = {"rounds": tag["num_spec_steps"], "accepted": tag["num_accepted_draft_tokens"]}
        return len(answer["token_ids"]), time.perf_counter() - started, {**tag["time"], **rounds}

    return run


def transformers_generate() -> Callable[[str], tuple[int, float, dict[str, float]]]:
    """``generate`` on the default model in bf16, loaded once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from services.model.store import dense, prepare

    prepared = prepare("default")
    tokenizer: Any = AutoTokenizer.from_pretrained(prepared.path)
    model: Any = AutoModelForCausalLM.from_pretrained(dense(prepared), dtype=torch.bfloat16)

    def run(prompt: str) -> tuple[int, float, dict[str, float]]:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        return output.shape[1] - inputs["input_ids"].shape[1], time.perf_counter() - started, {}

    return run


def main() -> int:
    runs = {"standard": served("standard"), "speculative": served("speculative"), "generate": transformers_generate()}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    link, length = [], []
    for _ in range(ROUNDS):
        for prompt in PROMPTS:
            for name, run in runs.items():
                tokens, seconds, step = run(prompt)
                rates[name].append(tokens / seconds)
                if step.get("rounds"):
                    link.append(step["link_ms"] / step["rounds"])
                    length.append(1 + step["accepted"] / step["rounds"])
    median = {name: statistics.median(values) for name, values in rates.items()}
    report = {
        "tokens_per_second": {name: round(value, 1) for name, value in median.items()},
        "standard_vs_generate": round(median["standard"] / median["generate"], 2),
        "speculative_vs_standard": round(median["speculative"] / median["standard"], 3),
        "link_ms_per_round": round(statistics.median(link), 3),
        "mean_acceptance_length": round(statistics.mean(length), 3),
    }
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
