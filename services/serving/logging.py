"""One JSON object a line, on standard error, with the request's id on every line of a request."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog

LogFormat = Literal["json", "console"]


def configure_logging(service: str, level: str = "info", fmt: LogFormat = "json") -> None:
    """Set up structlog for this process; ``service`` stands on every line.

    Context variables bound with :func:`structlog.contextvars.bind_contextvars` (``request_id``) are added to each line.
    """
    renderer: Any = (
        structlog.processors.JSONRenderer() if fmt == "json" else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add(service),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _add(service: str) -> Any:
    def add_service(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event["service"] = service
        return event

    return add_service
