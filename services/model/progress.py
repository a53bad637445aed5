"""Progress of long steps (downloads, hashing, conversions), for people, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

LINE_EVERY_S = 5.0
"""Where stderr is not a terminal, a long step says so often how far it is."""


class Progress(Protocol):
    def say(self, line: str) -> None:
        """Something was done, or is about to be."""
        ...

    def bytes(self, label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A step over ``total`` bytes; call what it gives with the bytes of each piece."""
        ...


class Silent:
    """No progress, for tests and libraries."""

    def say(self, line: str) -> None:
        pass

    @contextmanager
    def bytes(self, label: str, total: int) -> Iterator[Callable[[int], None]]:  # noqa: ARG002
        yield lambda _: None


class Terminal:
    """A bar where stderr is a terminal, else a line now and then."""

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    @contextmanager
    def bytes(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        if not sys.stderr.isatty():
            yield self._lines(label, total)
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda count: bar.advance(task, count)

    def _lines(self, label: str, total: int) -> Callable[[int], None]:
        done, said = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, said
            done += count
            if time.monotonic() - said >= LINE_EVERY_S:
                said = time.monotonic()
                self.say(f"{label}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

        return advance


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' warnings and bars: what matters is said by our own progress."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging  # its functions have no types
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
