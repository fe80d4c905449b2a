# SPDX-License-Identifier: Apache-2.0
"""Other users of the same host: what they put where our files go is neither followed nor believed.

Where the tests run as root, the other user is a real one; elsewhere only the links are tried.
"""

import io
import os
import stat
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import msgspec
import pytest

from holdfast.checkpoint.roots import Root
from holdfast.checkpoint.slots import Slot
from holdfast.cli import main
from holdfast.client.standalone import join_standalone
from holdfast.master import notes
from holdfast.master.process import MasterSettings
from holdfast.model.errors import StateError, UsageError
from holdfast.model.job import JobSpec
from holdfast.runtime.journal import SqliteJournal
from holdfast.runtime.private import make_private, read_private, write_private
from holdfast.runtime.settings import worker_place
from tests.integration.live_master import Home

OTHER = 65534
OWN = "# the user's own\n"
LIMIT_S = 60

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like /tmp, which every user may write to, and that everybody can reach."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "shared"))
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    for parent in folder.parents:
        if parent.owner() == folder.owner() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    return folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "profile"
    path.write_text(OWN)
    path.chmod(0o644)
    return path


def by_other(script: str, *arguments: str | Path) -> None:
    """Let another user of the host do this."""
    words = ["/bin/sh", "-ec", script, "sh", *map(str, arguments)]
    subprocess.run(words, user=OTHER, group=OTHER, check=True, timeout=LIMIT_S, cwd="/")


def settings(folder: Path) -> MasterSettings:
    return MasterSettings(
        job="train",
        listen="127.0.0.1:0",
        state=folder / "state",
        token_file=None,
        http="",
        tls_cert=None,
        tls_key=None,
        insecure=False,
        spec=JobSpec(),
    )


def leave_note(folder: Path) -> Path:
    return notes.write(settings(folder), "127.0.0.1:1", "", folder / "token")


def status(*words: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["status", *words])
    return code, out.getvalue() + err.getvalue()


def note_of(job: str) -> bytes:
    """As a stranger would leave it: its master is alive, at an address of theirs."""
    note = notes.Note(job, os.getpid(), "127.0.0.1:9", "", "/tmp/state", "/tmp/token")
    return msgspec.json.encode(note)


# ---- notes of running jobs -----------------------------------------------------------------------


@as_root
def test_a_folder_that_another_user_made_is_not_used(shared: Path, victim: Path) -> None:
    """The other makes the folder first, with links under every name that we might write to."""
    root = shared / f"holdfast-{os.getuid()}"
    by_other('mkdir -m 777 "$1" "$1/jobs"', root)
    for name in (f"train.{os.getpid()}.tmp", f"train.{os.getpid()}.json", "train.1.json"):
        by_other('ln -s "$1" "$2"', victim, root / "jobs" / name)
    with pytest.raises(StateError, match=r"not a directory of this user.*XDG_RUNTIME_DIR"):
        leave_note(shared)
    assert (victim.read_text(), stat.S_IMODE(victim.stat().st_mode)) == (OWN, 0o644)
    warnings: list[str] = []
    assert notes.read_all(warnings.append) == []
    assert "not a directory of this user" in "".join(warnings)
    code, said = status("--job", "train")
    assert (code, "somebody else put it there" in said) == (2, True)
    with pytest.raises(UsageError, match="not a directory of this user"):
        join_standalone(worker_place({}))


@as_root
def test_a_note_of_another_user_is_not_believed(shared: Path) -> None:
    """It would lead `holdfast status` to a master of theirs."""
    path = leave_note(shared)
    for name in ("other.1.json", "train.2.json"):
        planted = path.with_name(name)
        planted.write_bytes(note_of(name.partition(".")[0]))
        os.chown(planted, OTHER, OTHER)
    warnings: list[str] = []
    assert [note.address for note in notes.read_all(warnings.append)] == ["127.0.0.1:1"]
    assert len(warnings) == 2
    assert all("is not a file of this user" in sentence for sentence in warnings)
    code, said = status("--job", "other")
    assert (code, "no job 'other' runs here" in said) == (2, True)


def test_links_are_neither_written_through_nor_read(shared: Path, victim: Path) -> None:
    path = leave_note(shared)
    path.unlink()
    for name in (path.with_suffix(".tmp"), path):
        name.symlink_to(victim)
    assert leave_note(shared) == path
    assert victim.read_text() == OWN
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    elsewhere = shared / "elsewhere"
    elsewhere.write_bytes(note_of("other"))
    path.with_name("other.1.json").symlink_to(elsewhere)
    os.mkfifo(path.with_name("pipe.1.json"))
    path.with_name("large.1.json").write_bytes(b" " * (notes.NOTE_BYTES_MAX + 1))
    warnings: list[str] = []
    assert [note.job for note in notes.read_all(warnings.append)] == ["train"]
    assert len(warnings) == 3


def test_a_folder_of_ours_that_is_open_is_closed(shared: Path) -> None:
    root = shared / f"holdfast-{os.getuid()}"
    root.mkdir()
    root.chmod(0o777)
    leave_note(shared)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_link_in_place_of_the_folder_is_refused(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (shared / f"holdfast-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="not a directory of this user"):
        leave_note(shared)
    assert list((tmp_path / "elsewhere").iterdir()) == []


# ---- the state of a master -----------------------------------------------------------------------


@as_root
@pytest.mark.parametrize("name", ["token", "journal.db", "journal.db-wal", "lock", "nodes"])
def test_a_state_that_another_user_prepared_is_refused(shared: Path, name: str) -> None:
    state = shared / "state"
    by_other('mkdir -m 777 "$1"; echo 0123456789abcdef0123456789abcdef > "$2"', state, state / name)
    with pytest.raises(StateError, match=f"{name} belongs to another user"):
        SqliteJournal.open(state, job="train")


def test_links_in_a_state_are_refused(tmp_path: Path, victim: Path) -> None:
    for name in ("token", "journal.db", "lock"):
        state = tmp_path / f"state-{name}"
        state.mkdir()
        (state / name).symlink_to(victim)
        with pytest.raises(StateError, match="is a link"):
            SqliteJournal.open(state, job="train")
    assert victim.read_text() == OWN


def test_a_state_of_ours_is_used_again(tmp_path: Path) -> None:
    for _ in range(2):
        SqliteJournal.open(tmp_path / "state", job="train").close()


@as_root
def test_a_master_says_what_is_in_its_way(tmp_path: Path) -> None:
    """The whole command, where another user has put a token first."""
    token = tmp_path / "state" / "token"
    token.parent.mkdir()
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    os.chown(token, OTHER, OTHER)
    words = ("master", "--job", "t", "--listen", "127.0.0.1:0", "--state", str(token.parent))
    done = Home(tmp_path).run(*words)
    assert done.returncode == 1
    assert f"holdfast: {token} belongs to another user (number {OTHER})" in done.stderr


# ---- memory and logs -----------------------------------------------------------------------------


@as_root
def test_memory_of_another_user_is_not_adopted(shared: Path) -> None:
    ours = Root.take(shared, "job", "one")
    by_other('mkdir -m 777 "$1"', shared / "theirs")
    (shared / "theirs").rename(ours.path.with_name("two"))
    assert list(ours.orphans()) == []
    assert list(ours.dead(0.0)) == []
    assert ours.path.with_name("two").exists()
    ours.remove()


@as_root
def test_a_memory_folder_that_another_user_made_is_refused(shared: Path) -> None:
    by_other('mkdir -m 777 "$1"', shared / f"holdfast-{os.getuid()}")
    with pytest.raises(StateError, match="not a directory of this user"):
        Root.take(shared, "job", "one")


def test_a_link_is_no_slot(tmp_path: Path) -> None:
    slot = Slot.create(tmp_path / "slot", 4096)
    slot.close()
    (tmp_path / "link").symlink_to(tmp_path / "slot")
    with pytest.raises(StateError, match="link"):
        Slot.open(tmp_path / "link", writable=True)


# ---- the three calls -----------------------------------------------------------------------------


def test_what_was_written_is_read(tmp_path: Path) -> None:
    make_private(tmp_path / "folder")
    path = tmp_path / "folder" / "file"
    for content in (b"one", b"two"):
        write_private(path, content)
        assert read_private(path, 3) == content
    assert [path.name for path in path.parent.iterdir()] == ["file"]
    with pytest.raises(StateError, match="more than 2 bytes"):
        read_private(path, 2)
