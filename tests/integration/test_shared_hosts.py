# SPDX-License-Identifier: Apache-2.0
"""Other users of the same host: what they put where our files go is neither followed nor believed.

Where the tests run as root, the other user is a real one; elsewhere only the links are tried.
"""

import asyncio
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
from holdfast.model.errors import AwayError, StateError, UsageError
from holdfast.model.job import JobSpec
from holdfast.platforms.local import LocalPlatform
from holdfast.runtime.journal import SqliteJournal
from holdfast.runtime.private import make_private, read_private, write_private
from holdfast.runtime.settings import worker_place
from holdfast.runtime.token import make_token
from tests.disks import small_disk
from tests.hearing import Heard
from tests.integration.faults import Disk
from tests.integration.jobs import Jobs
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
@pytest.mark.parametrize(
    "name",
    [
        *("token", "journal.db", "journal.db-wal", "journal.db-journal", "journal.db-shm"),
        *("lock", "nodes"),
    ],
)
def test_a_state_that_another_user_prepared_is_refused(shared: Path, name: str) -> None:
    state = shared / "state"
    by_other('mkdir -m 777 "$1"; echo 0123456789abcdef0123456789abcdef > "$2"', state, state / name)
    with pytest.raises(StateError, match=f"{name} belongs to another user"):
        SqliteJournal.open(state, job="train")


@as_root
def test_whose_a_state_is_waits_for_a_disk_that_is_full(tmp_path: Path) -> None:
    """A server may know this user by another number, and only a file made there tells which."""
    with small_disk(tmp_path / "disk", "size=1m,nr_inodes=30") as path:
        state, disk = path / "state", Disk(path)
        SqliteJournal.open(state, job="train").close()
        for file in state.iterdir():
            os.chown(file, OTHER, OTHER)
        disk.fill_inodes()
        with pytest.raises(AwayError, match="cannot be told"):
            SqliteJournal.open(state, job="train")
        disk.clear()
        with pytest.raises(StateError, match="belongs to another user") as caught:
            SqliteJournal.open(state, job="train")
        assert not isinstance(caught.value, AwayError)


def test_a_token_that_the_disk_does_not_give_is_away(tmp_path: Path) -> None:
    with pytest.raises(AwayError, match="Input/output error"):
        make_token(Path("/proc/self/mem"))
    with pytest.raises(UsageError, match="No such file or directory"):
        make_token(tmp_path / "nowhere" / "token")


@as_root
def test_a_token_that_another_user_prepared_is_refused(shared: Path) -> None:
    """Wherever it lies: its maker could do with the job what its owner can."""
    token = shared / "token"
    by_other('echo 0123456789abcdef0123456789abcdef > "$1"; chmod 600 "$1"', token)
    with pytest.raises(StateError, match="token belongs to another user"):
        make_token(token)
    (shared / "link").symlink_to(token)
    with pytest.raises(StateError, match="token belongs to another user"):
        make_token(shared / "link")


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


@as_root
def test_a_state_directory_that_others_can_change_is_refused(shared: Path) -> None:
    """Its files are looked at once; whoever may rename there could swap them afterwards."""
    by_other('mkdir -m 777 "$1"', shared / "state")
    with pytest.raises(StateError, match=rf"number {OTHER}.*everybody.*choose another directory"):
        SqliteJournal.open(shared / "state", job="train")
    assert list((shared / "state").iterdir()) == []


@as_root
@pytest.mark.parametrize("mode", ["755", "2775", "1777"])
def test_a_state_directory_of_a_project_is_used(shared: Path, mode: str) -> None:
    """As they are on clusters: a group's, or one where only owners remove."""
    by_other('mkdir "$1"; chmod "$2" "$1"', shared / "state", mode)
    SqliteJournal.open(shared / "state", job="train").close()


@as_root
def test_a_link_that_is_planted_while_a_job_runs_is_not_written_through(
    shared: Path, victim: Path, jobs: Jobs
) -> None:
    """Into a directory that its user has left open: the end of a failed job went through it."""
    state = shared / "state"
    state.mkdir()
    state.chmod(0o777)
    fails = jobs.write(
        "fails.py",
        "import pathlib, sys, time\n"
        "while not pathlib.Path(sys.argv[1], 'go').exists(): time.sleep(0.01)\n"
        "sys.exit('this is the cause')\n",
    )
    job = jobs.run(
        *("--nproc-per-node", "1", "--max-restarts", "0"),
        *("--state", str(state), fails, str(jobs.folder)),
    )
    job.wait_line("all workers run")
    by_other('ln -s "$1" "$2"', victim, state / "end.json")
    jobs.go()
    assert job.wait() == 1
    assert "this is the cause" in job.text
    assert (victim.read_text(), stat.S_IMODE(victim.stat().st_mode)) == (OWN, 0o644)
    assert not (state / "end.json").is_symlink()
    jobs.expect_nothing_left()


@as_root
@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal"])
def test_status_reads_no_journal_that_another_user_prepared(shared: Path, name: str) -> None:
    state = shared / "state"
    SqliteJournal.open(state, job="train").close()
    state.chmod(0o777)
    by_other('mv "$1" "$1.old" || true; echo > "$1"', state / name)
    code, said = status("--state", str(state))
    assert (code, f"{name} is not a file of this user" in said) == (1, True), said


@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal"])
def test_status_follows_no_link_and_reads_no_device(tmp_path: Path, name: str) -> None:
    """A link to /dev/zero filled the temporary folder."""
    state = tmp_path / "state"
    SqliteJournal.open(state, job="train").close()
    (state / name).unlink(missing_ok=True)
    (state / name).symlink_to("/dev/zero")
    code, said = status("--state", str(state))
    assert (code, f"{name} is a link" in said) == (1, True), said
    (state / name).unlink()
    os.mkfifo(state / name)
    code, said = status("--state", str(state))
    assert (code, f"{name} is not a file of this user" in said) == (1, True), said


def test_a_birth_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "birth").write_text(f'{{"pid":{os.getpid()},"created":0}}')
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "0.json").symlink_to(tmp_path / "birth")

    async def scene() -> None:
        platform = LocalPlatform(["true"], {}, tmp_path / "nodes", lifeline=-1, say=Heard())
        with pytest.raises(StateError, match=r"0\.json is a link"):
            await anext(platform.watch())

    asyncio.run(scene())


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
