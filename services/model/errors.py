"""What can be wrong with a model that someone names: its message is one line that says what to change."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be prepared or loaded as it is. Command lines print the message and exit with code 2."""


def first_line(error: Exception) -> str:
    """What a library's error says, cut to a line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
