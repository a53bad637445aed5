"""Settings that every service has. Each field is an environment variable: the service's prefix and the field's name."""

from __future__ import annotations

import sys
from typing import Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings

from services.serving.logging import LogFormat

S = TypeVar("S", bound="ServiceSettings")


class ServiceSettings(BaseSettings):
    """Logging, metrics and draining."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: LogFormat = Field("json", description="json or console")
    metrics_port: int = Field(-1, ge=-1, le=65535, description="HTTP port of /metrics; 0 picks one, -1 is off")
    drain_seconds: float = Field(
        10.0, ge=0, le=3600, description="how long open streams may go on after SIGTERM, seconds"
    )


def describe(settings: type[ServiceSettings]) -> str:
    """The settings as text: variable, default, meaning."""
    prefix = settings.model_config.get("env_prefix", "")
    lines = ["Settings by environment:"]
    for name, field in settings.model_fields.items():
        default = "required" if field.is_required() else f"default {field.default!r}"
        lines.append(f"  {prefix}{name.upper()}  ({default})\n      {field.description or ''}")
    return "\n".join(lines)


def from_environment(settings: type[S], usage: str) -> S:
    """Read the settings of a service's main module; answers --help. Exits with code 2 and one line for each bad
    value."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{usage}\n\n{describe(settings)}")
        raise SystemExit(0)
    if sys.argv[1:]:
        print(f"unknown argument {sys.argv[1]!r}; settings come from the environment, see --help", file=sys.stderr)
        raise SystemExit(2)
    try:
        return settings()
    except ValidationError as error:
        prefix = settings.model_config.get("env_prefix", "")
        for problem in error.errors():
            print(f"{prefix}{'_'.join(map(str, problem['loc'])).upper()}: {problem['msg']}", file=sys.stderr)
        raise SystemExit(2) from error
