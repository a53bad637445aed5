"""One draft a socket, in a folder that nobody else can look into."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from services.link.socket import SocketError, SocketLock

ROOT = Path(__file__).parents[3]


def test_the_folder_is_made_private(tmp_path: Path) -> None:
    lock = SocketLock(tmp_path / "run" / "draft.sock")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert lock.address == f"unix:{tmp_path}/run/draft.sock"
    lock.release()


def test_a_second_draft_on_the_same_socket_is_refused_and_the_first_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "draft.sock"
    lock = SocketLock(path)
    path.touch()
    with pytest.raises(SocketError, match="another draft"):
        SocketLock(path)
    assert path.exists()
    lock.release()
    SocketLock(path).release()


def test_a_socket_left_by_a_killed_draft_does_not_block_the_next(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    path = tmp_path / "run" / "draft.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    path.with_name("draft.sock.lock").touch()
    lock = SocketLock(path)
    assert not path.exists()
    lock.release()


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o755)
    with pytest.raises(SocketError, match="0700"):
        SocketLock(tmp_path / "run" / "draft.sock")


def test_a_link_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SocketError, match="link"):
        SocketLock(tmp_path / "run" / "draft.sock")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(SocketError, match="another user"):
        SocketLock(tmp_path / "run" / "draft.sock")


def test_a_path_that_no_socket_can_have_is_refused_with_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(SocketError, match="shorter"):
        SocketLock(tmp_path / ("x" * 120) / "draft.sock")


HOLDER = """
import socket, sys, time
from pathlib import Path
from services.link.socket import SocketLock
lock = SocketLock(Path(sys.argv[1]))
server = socket.socket(socket.AF_UNIX)
server.bind(str(lock.path))
print("held", flush=True)
time.sleep(600)
"""


def test_a_draft_that_is_killed_frees_the_path_and_its_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run" / "draft.sock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(SocketError, match="another draft"):
            SocketLock(path)
    finally:
        holder.kill()
        holder.communicate()
    assert path.is_socket()
    lock = SocketLock(path)
    assert not path.exists()
    lock.release()


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o770, 0o777])
def test_any_access_of_others_to_the_folder_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    with pytest.raises(SocketError, match="0700"):
        SocketLock(tmp_path / "run" / "draft.sock")
    assert list((tmp_path / "run").iterdir()) == []
