"""Settings of the target: environment variables SLIPSTREAM_TARGET_..."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.serving.settings import ServiceSettings


class TargetSettings(ServiceSettings):
    """The model, its cache, and how it speculates."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_TARGET_")

    address: str = Field("127.0.0.1:50051", description="gRPC address to listen on")
    model: str = Field("default", description='"default", or the path of a GGUF file or a Hugging Face folder')
    compute_path: Literal["auto", "fast", "reference"] = Field("auto", description="auto, fast or reference")
    threads: int = Field(min(os.cpu_count() or 1, 16), ge=1, le=256, description="threads of the pass")
    context: int = Field(0, ge=0, description="tokens of prompt and answer together, at most; 0: the model's limit")
    cache_tokens: int = Field(16384, ge=16, description="tokens that the key-value cache holds")
    max_sequences: int = Field(16, ge=1, le=1024, description="requests decoded at once")
    prefill_rows: int = Field(256, ge=1, le=8192, description="rows of prompts in one pass")
    max_waiting: int = Field(64, ge=0, description="requests that may wait for a place; more are refused")
    speculation: Literal["on", "off"] = Field("on", description="on or off")
    draft: str = Field(
        f"unix:/tmp/slipstream-{os.getuid()}/draft.sock", description="gRPC address of the draft; empty: there is none"
    )
    draft_length: int = Field(4, ge=1, le=16, description="guesses of a round")
    round_budget_ms: float = Field(50.0, gt=0, le=10_000, description="longest wait for the draft in a round")
    verification: Literal["token", "block", "coupled"] = Field(
        "block", description="for sampled requests that do not choose"
    )
    shared_memory: Path | None = Field(
        Path("/dev/shm"), description="memory-backed folder shared with the draft; empty: tensors ride inline"
    )
