"""Settings of the draft: environment variables SLIPSTREAM_DRAFT_..."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.serving.settings import ServiceSettings


class DraftSettings(ServiceSettings):
    """The draft's model and where it is reached."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_DRAFT_")

    socket: Path = Field(
        Path(f"/tmp/slipstream-{os.getuid()}/draft.sock"), description="Unix socket to serve on; its folder is 0700"
    )
    model: str = Field(
        "default", description='"default", the folder of a feature-fed draft, a GGUF file or a Hugging Face folder'
    )
    drafter: str = Field(
        "",
        description='a drafter of your own: "package.module:function", called with these settings; empty: by the model',
    )
    target: str = Field("default", description="the target's model, for the embedding and head of a feature-fed draft")
    threads: int = Field(min(os.cpu_count() or 1, 2), ge=1, le=256, description="threads of the pass")
    context: int = Field(4096, ge=16, description="tokens of a sequence that the draft holds")
    max_sequences: int = Field(16, ge=1, le=1024, description="sequences that the draft holds at once")
    max_draft_length: int = Field(16, ge=1, le=16, description="guesses of a round, at most")
    shared_memory: Path | None = Field(
        Path("/dev/shm"), description="memory-backed folder shared with the target; empty: tensors ride inline"
    )
