"""Fixtures that several suites share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from tests.stack import Client, Stack


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Logs of code that runs in the test process go nowhere."""
    structlog.configure(processors=[structlog.testing.LogCapture()], cache_logger_on_first_use=False)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """All three services on the default model, shared by the tests that only ask them."""
    stack = Stack().start()
    stack.wait_for_draft()
    yield stack
    stack.stop()


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    client = Client(stack.gateway_address)
    yield client
    client.close()


@pytest.fixture
def own_stack() -> Iterator[Stack]:
    """A stack of the test's own, not started yet, for tests that break it."""
    stack = Stack()
    yield stack
    stack.stop()
