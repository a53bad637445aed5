"""Settings of the gateway: environment variables SLIPSTREAM_GATEWAY_..."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.serving.server import MAX_MESSAGE_BYTES
from services.serving.settings import ServiceSettings


class GatewaySettings(ServiceSettings):
    """Where it listens, which target it fronts, and how much it takes on."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_GATEWAY_")

    address: str = Field("127.0.0.1:50050", description="gRPC address to listen on")
    target: str = Field("127.0.0.1:50051", description="gRPC address of the target")
    max_running: int = Field(16, ge=1, le=4096, description="requests at the target at once")
    max_waiting: int = Field(64, ge=0, le=65536, description="requests that may wait; more are refused")
    max_request_bytes: int = Field(
        4 * 1024 * 1024,
        ge=1024,
        le=MAX_MESSAGE_BYTES - 64 * 1024,  # It must also fit into the message to the target.
        description="size of a request, at most",
    )
    max_seconds: float = Field(
        600.0, gt=0, description="longest time for a request without a deadline of its own, seconds"
    )
