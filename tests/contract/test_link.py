"""The link between real processes: killed, hung, restarted, taken over. Nothing blocks, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from slipstream.v1 import common_pb2, draft_pb2, draft_pb2_grpc

from services.draft.settings import DraftSettings
from services.link import client
from services.link.arena import Arena, ArenaError
from services.link.client import DraftLink
from services.link.round import OK
from tests.unit.link.toys import HIDDEN, TARGET, eventually, following, opening

ROOT = Path(__file__).parents[2]
INVALID = common_pb2.FALLBACK_REASON_DRAFT_INVALID
SLOW = common_pb2.FALLBACK_REASON_DRAFT_SLOW
LOST = common_pb2.FALLBACK_REASON_DRAFT_LOST
ABSENT = common_pb2.FALLBACK_REASON_DRAFT_ABSENT


class DraftProcess:
    """``python -m services.draft`` with a drafter without a model."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.socket = folder / "run" / "draft.sock"
        self.memory = folder / "memory"
        self.memory.mkdir(exist_ok=True)
        self.log = (folder / "draft.log").open("ab")
        self.environment = {
            **os.environ,
            "SLIPSTREAM_DRAFT_SOCKET": str(self.socket),
            "SLIPSTREAM_DRAFT_SHARED_MEMORY": str(self.memory),
            "SLIPSTREAM_DRAFT_DRAFTER": "tests.contract.drafters:counting",
            "SLIPSTREAM_DRAFT_TARGET": "none",
            **environment,
        }
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "services.draft"]
        return subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=self.log, stderr=self.log)

    def restart(self) -> None:
        self.process = self._start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def logged(self) -> str:
        return Path(self.log.name).read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        self.log.close()


@pytest.fixture
def start_draft(tmp_path: Path) -> Iterator[Callable[..., DraftProcess]]:
    started: list[DraftProcess] = []

    def start(**environment: str) -> DraftProcess:
        started.append(DraftProcess(tmp_path, **environment))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture
def draft(start_draft: Callable[..., DraftProcess]) -> DraftProcess:
    return start_draft()


@pytest.fixture
def link(draft: DraftProcess) -> Iterator[DraftLink]:
    link = DraftLink(f"unix:{draft.socket}", TARGET, HIDDEN, 10.0, draft.memory)
    link.start()
    eventually(lambda: link.state.ready)
    yield link
    link.close()


def segments(draft: DraftProcess) -> list[str]:
    return [path.name for path in draft.memory.iterdir()]


def held_open(process: int, folder: Path) -> list[str]:
    """Files of a folder that a process holds open, deleted or not."""
    links = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()]
    return [link for link in links if link.startswith(str(folder))]


def test_a_round_between_two_processes(link: DraftLink, draft: DraftProcess) -> None:
    result = link.propose([opening(1, [4, 5], 3, want_distribution=True)])
    assert result.drafts[1].tokens == [6, 7, 8]
    assert result.drafts[1].q is not None
    assert segments(draft) == []
    assert len(held_open(os.getpid(), draft.memory)) == 1


def test_a_killed_draft_leaves_nothing_and_the_next_one_is_used(link: DraftLink, draft: DraftProcess) -> None:
    assert link.propose([opening(1, [4, 5], 1)]).reason == OK
    session = link.state.session
    draft.kill()
    eventually(lambda: not link.state.ready)
    assert link.propose([following(1, 3, [6], 1)]).reason == ABSENT
    eventually(lambda: held_open(os.getpid(), draft.memory) == [])
    assert segments(draft) == []
    draft.restart()
    eventually(lambda: link.state.ready)
    assert link.state.session != session
    assert link.propose([opening(1, [4, 5, 6], 1)]).drafts[1].tokens == [7]


def test_a_draft_killed_in_the_middle_of_a_round_ends_the_wait(link: DraftLink, draft: DraftProcess) -> None:
    draft.socket.with_name("switch").write_text("crash")
    assert link.propose([opening(1, [4, 5], 1)]).reason == LOST
    draft.process.wait()
    draft.socket.with_name("switch").unlink()
    draft.restart()
    eventually(lambda: link.state.ready)
    assert link.propose([opening(1, [4, 5], 1)]).drafts[1].tokens == [6]


def test_a_hung_draft_costs_one_budget_and_is_used_again_when_it_goes_on(link: DraftLink, draft: DraftProcess) -> None:
    link._budget_s = 0.2
    os.kill(draft.process.pid, signal.SIGSTOP)
    reasons = [link.propose([opening(1, [4, 5], 1)]).reason for _ in range(50)]
    assert set(reasons) <= {SLOW, ABSENT}
    assert reasons[0] == SLOW
    os.kill(draft.process.pid, signal.SIGCONT)
    link._budget_s = 10
    eventually(lambda: link.propose([opening(2, [4, 5], 1)]).reason == OK)


def test_a_slow_draft_is_left_alone_for_a_while_and_tried_again(
    link: DraftLink, draft: DraftProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TROUBLE_PAUSE_S", (0.1, 0.2))
    link._budget_s = 0.05
    session = link.state.session
    draft.socket.with_name("switch").write_text("slow")
    eventually(lambda: link.propose([opening(1, [4, 5], 1)]).reason == SLOW and not link.state.ready)
    draft.socket.with_name("switch").unlink()
    eventually(lambda: link.state.ready and link.state.session != session)
    link._budget_s = 10
    assert link.propose([opening(1, [4, 5], 1)]).drafts[1].tokens == [6]


def start_target(draft: DraftProcess) -> subprocess.Popen[bytes]:
    """A target in a process of its own, attached and in the middle of a sequence."""
    command = [sys.executable, "-c", TARGET_PROCESS, f"unix:{draft.socket}", str(draft.memory)]
    target = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert target.stdout is not None
    with target.stdout as output:
        assert b"attached\n" in iter(output.readline, b"")
    return target


TARGET_PROCESS = """
import sys, time
from pathlib import Path
from services.link.client import DraftLink
from tests.unit.link.toys import HIDDEN, TARGET, eventually, opening
link = DraftLink(sys.argv[1], TARGET, HIDDEN, 10.0, Path(sys.argv[2]))
link.start()
eventually(lambda: link.state.ready)
assert link.propose([opening(1, [4, 5], 1)]).drafts[1].tokens == [6]
print("attached", flush=True)
time.sleep(600)
"""


def test_a_killed_target_leaves_no_sequence_no_segment_and_room_for_the_next(draft: DraftProcess) -> None:
    for _ in range(3):
        target = start_target(draft)
        target.kill()
        target.wait()
    eventually(lambda: draft.logged().count("session ended") == 3)
    assert segments(draft) == []
    eventually(lambda: held_open(draft.process.pid, draft.memory) == [])


def test_killing_both_leaves_no_segment_and_no_socket_that_blocks(draft: DraftProcess) -> None:
    target = start_target(draft)
    target.kill()
    draft.kill()
    target.wait()
    assert segments(draft) == []
    draft.restart()
    link = DraftLink(f"unix:{draft.socket}", TARGET, HIDDEN, 10.0, draft.memory)
    link.start()
    eventually(lambda: link.state.ready)
    link.close()


def test_segments_of_a_draft_that_was_killed_while_attaching_are_removed_at_the_next_start(
    draft: DraftProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Arena.create(draft.memory, 64)
    left.close()
    draft.kill()
    # As old as a name must be to be judged: status times cannot be set, so the next draft's clock runs ahead.
    ahead = "import time; now = time.time; time.time = lambda: now() + 60; import runpy; "
    code = ahead + "runpy.run_module('services.draft', run_name='__main__')"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=draft.environment, stderr=draft.log)
    try:
        eventually(lambda: segments(draft) == [])
    finally:
        process.kill()
        process.wait()


def test_a_second_draft_on_the_socket_is_refused_and_the_first_goes_on(
    link: DraftLink, draft: DraftProcess, start_draft: Callable[..., DraftProcess]
) -> None:
    second = start_draft()
    assert second.process.wait(timeout=60) == 2
    assert "another draft serves this socket" in second.logged()
    assert link.propose([opening(1, [4, 5], 1)]).drafts[1].tokens == [6]


def test_a_draft_without_shared_memory_gives_the_same_answers(start_draft: Callable[..., DraftProcess]) -> None:
    draft = start_draft(SLIPSTREAM_DRAFT_SHARED_MEMORY="/nowhere/at/all")
    link = DraftLink(f"unix:{draft.socket}", TARGET, HIDDEN, 10.0, draft.memory)
    link.start()
    eventually(lambda: link.state.ready)
    result = link.propose([opening(1, [4, 5], 2, want_distribution=True)])
    assert result.drafts[1].q is not None
    assert result.drafts[1].q[0, 6] == 0.75
    link.close()


def test_help_names_every_setting_and_a_bad_one_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "services.draft"]
    answer = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    for name in DraftSettings.model_fields:
        assert f"SLIPSTREAM_DRAFT_{name.upper()}" in answer.stdout
    wrong = {**os.environ, "SLIPSTREAM_DRAFT_CONTEXT": "many"}
    refused = subprocess.run(command, cwd=ROOT, env=wrong, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("SLIPSTREAM_DRAFT_CONTEXT:")


def test_health_and_info_are_served_on_the_socket(link: DraftLink, draft: DraftProcess) -> None:
    with grpc.insecure_channel(f"unix:{draft.socket}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "slipstream.v1.DraftService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        info = draft_pb2_grpc.DraftServiceStub(channel).GetInfo(draft_pb2.DraftServiceGetInfoRequest(), timeout=10)
        assert info.drafters == ["counting"]


def test_a_draft_that_is_told_to_stop_ends_its_sessions_and_exits_cleanly(link: DraftLink, draft: DraftProcess) -> None:
    link.propose([opening(1, [4, 5], 1)])
    draft.process.send_signal(signal.SIGTERM)
    assert draft.process.wait(timeout=30) == 0
    assert not draft.socket.exists()
    assert segments(draft) == []
    eventually(lambda: not link.state.ready)


def test_reconnecting_leaks_neither_threads_nor_files(link: DraftLink, draft: DraftProcess) -> None:
    def restarted() -> tuple[int, int]:
        session = link.state.session
        assert link._session is not None
        link._session.call.cancel()
        eventually(lambda: link.state.ready and link.state.session != session)
        assert link.propose([opening(1, [4, 5], 1, want_distribution=True)]).reason == OK
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        restarted()
    threads, files = restarted()
    for _ in range(20):
        restarted()
    eventually(lambda: restarted()[0] <= threads and restarted()[1] <= files)
    eventually(lambda: len(held_open(draft.process.pid, draft.memory)) == 1)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of the test's own in real shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="slipstream-test-") as folder:
        yield Path(folder)


def connect(draft: DraftProcess, memory: Path) -> DraftLink:
    link = DraftLink(f"unix:{draft.socket}", TARGET, HIDDEN, 10.0, memory)
    link.start()
    eventually(lambda: link.state.ready)
    return link


def test_memory_that_is_cut_short_under_both_costs_a_round_and_no_process(
    start_draft: Callable[..., DraftProcess], memory: Path
) -> None:
    draft = start_draft(SLIPSTREAM_DRAFT_SHARED_MEMORY=str(memory))
    link = connect(draft, memory)
    try:
        session = link._session
        assert session is not None
        assert session.proposals is not None
        assert link.propose([opening(1, [4, 5], 2, want_distribution=True)]).drafts[1].q is not None
        (name,) = held_open(draft.process.pid, memory)
        assert name.endswith(" (deleted)")
        (fd,) = [p for p in Path("/proc/self/fd").iterdir() if p.is_symlink() and os.readlink(p) == name]
        # Where a mapping would end in a SIGBUS. The next write makes the file longer again: read it before.
        os.truncate(fd, 0)
        with pytest.raises(ArenaError):
            session.proposals.read(1, 1, 0, 512)
        result = link.propose([following(1, 3, [6], 2, want_distribution=True)])
        assert result.reason in {OK, INVALID}
        assert draft.process.poll() is None
        eventually(lambda: link.state.ready)
        again = link.propose([opening(2, [4, 5], 1, want_distribution=True)])
        assert again.drafts[2].q is not None
        assert again.drafts[2].q[0, 6] == 0.75
        assert list(memory.iterdir()) == []
    finally:
        link.close()


def test_two_targets_share_a_draft_and_the_end_of_one_leaves_the_others_memory_alone(
    start_draft: Callable[..., DraftProcess], memory: Path
) -> None:
    draft = start_draft(SLIPSTREAM_DRAFT_SHARED_MEMORY=str(memory))
    first, second = connect(draft, memory), connect(draft, memory)
    try:
        session = first.state.session
        # The same id in both: no session can name another one's sequences.
        for link, token in ((first, 4), (second, 40)):
            assert link.propose([opening(1, [token], 1, want_distribution=True)]).drafts[1].tokens == [token + 1]
        assert len(held_open(draft.process.pid, memory)) == 2
        second.release([1])
        second.close()
        eventually(lambda: len(held_open(draft.process.pid, memory)) == 1)
        result = first.propose([following(1, 2, [5], 1, want_distribution=True)])
        assert result.drafts[1].q is not None
        assert (result.drafts[1].tokens, result.drafts[1].q[0, 6]) == ([6], 0.75)
        assert first.state.session == session
    finally:
        first.close()
        second.close()


def test_a_draft_of_another_tokenizer_is_refused_by_name_and_stays_up(draft: DraftProcess) -> None:
    other = common_pb2.ModelInfo()
    other.CopyFrom(TARGET)
    other.tokenizer_fingerprint = "sha256:others"
    link = DraftLink(f"unix:{draft.socket}", other, HIDDEN, 10.0, draft.memory)
    link.start()
    try:
        eventually(lambda: link.state.reason == common_pb2.FALLBACK_REASON_VOCABULARY_MISMATCH)
        assert link.propose([opening(1, [4], 1)]).reason == common_pb2.FALLBACK_REASON_VOCABULARY_MISMATCH
        assert draft.process.poll() is None
        assert segments(draft) == []
    finally:
        link.close()
