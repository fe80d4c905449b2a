# SPDX-License-Identifier: Apache-2.0
"""One entry of a checkpoint directory that cannot be read: it costs no other checkpoint anything.

Such as the `lost+found` of an ext4 volume, which is only for root, or a block that a disk has lost.
"""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.commit import put_in_order
from holdfast.checkpoint.manifest import MANIFEST, find_committed, list_committed
from holdfast.checkpoint.posix import PosixStorage
from holdfast.checkpoint.retention import apply_retention, remove_steps
from holdfast.cli import main
from holdfast.model.checkpoint import Series, Version
from holdfast.model.errors import RejectedError, RetryableError, StateError
from tests.storages import load, make_state, save

OTHER = 65534
STATE = make_state(1, ranks=1, size=5000)


class Directory:
    """A directory of checkpoints, and entries of it that cannot be read."""

    why = ""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder, scratch
        self.storage = PosixStorage(str(folder))
        self.series = Series(str(folder), keep_last=2)

    def save(self, step: int, lineage: int = 1) -> None:
        version, attempt = Version(lineage, step), f"m-{lineage}-{step}"
        save(self.storage, self.series, version, STATE, attempt, self.scratch)

    def name(self, step: int) -> str:
        return self.series.name(step)

    def steps(self, said: list[str] | None = None) -> list[int]:
        report = None if said is None else said.append
        found = list_committed(self.storage, self.series, report)
        return [one.version.step for one in found]

    def hide(self, name: str) -> None:
        """Let nobody read this entry, which is made if it is not there."""

    def show(self, name: str) -> None:
        """Let it be read again."""

    def ckpt(self, verb: str, *words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(["ckpt", verb, str(self.folder), *words])
        return code, out.getvalue(), err.getvalue()


class Guarded(Directory):
    """Another user's entries; this process goes on as a user that has no rights to them."""

    why = "Permission denied"

    def hide(self, name: str) -> None:
        self._give(name, 0, 0o700)

    def show(self, name: str) -> None:
        self._give(name, OTHER, 0o755)

    def _give(self, name: str, user: int, mode: int) -> None:
        with acting_as(0):
            path = self.folder / name
            path.mkdir(exist_ok=True)
            path.chmod(mode)
            os.chown(path, user, user)


class Decaying(Directory):
    """Entries whose manifests are on blocks that the disk cannot read."""

    why = "Input/output error"

    def __init__(self, folder: Path, scratch: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, scratch)
        self._hidden: set[str] = set()
        real = os.open

        def guarded(path: Any, *words: Any, **named: Any) -> int:
            if str(path) in self._hidden:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *words, **named)

        patch.setattr(os, "open", guarded)

    def hide(self, name: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        manifest = self.folder / name / MANIFEST
        if not manifest.exists():
            manifest.write_bytes(b"?")
        self._hidden.add(str(manifest))

    def show(self, name: str) -> None:
        self._hidden.remove(str(self.folder / name / MANIFEST))


@contextmanager
def acting_as(user: int) -> Iterator[None]:
    before = os.geteuid()
    os.seteuid(0)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.seteuid(before)


@pytest.fixture(params=["another user's", "a bad block"])
def directory(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Directory]:
    shared = tmp_path / "shared"
    shared.mkdir()
    if request.param == "a bad block":
        yield Decaying(shared / "ckpt", shared, monkeypatch)
        return
    if os.getuid() != 0:
        pytest.skip("only root can be two users")
    shared.chmod(0o777)
    for parent in shared.parents:
        if parent.owner() == shared.owner() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    # Python itself may be out of the other user's reach: what is imported late is imported now.
    warm = Directory(tmp_path / "warm", tmp_path)
    warm.save(1)
    for verb in ("ls", "show", "verify"):
        warm.ckpt(verb)
    with acting_as(OTHER):
        yield Guarded(shared / "ckpt", shared)


def test_what_is_no_checkpoint_by_its_name_costs_nothing(directory: Directory) -> None:
    directory.save(1)
    directory.hide("lost+found")
    for step in (2, 3, 4):
        directory.save(step)
        apply_retention(directory.storage, directory.series)
    said: list[str] = []
    assert (directory.steps(said), said) == ([4, 3], [])
    assert directory.storage.get("latest") == directory.name(4).encode()
    assert remove_steps(directory.storage, directory.series, {3}) == [3]
    assert put_in_order(directory.storage, directory.series) == []
    assert load(directory.storage, directory.series, Version(1, 4), directory.scratch) == STATE
    for verb in ("ls", "show", "verify"):
        code, out, err = directory.ckpt(verb)
        assert (code, err) == (0, "")
        assert out
    assert directory.ckpt("rm", "4", "--yes", "--force")[0] == 0
    assert "no checkpoints" in directory.ckpt("ls")[1]


def test_an_older_checkpoint_that_cannot_be_read_hides_no_other(directory: Directory) -> None:
    directory.save(1)
    directory.save(2)
    directory.hide(directory.name(2))
    directory.save(3)
    directory.save(4)
    assert directory.storage.get("latest") == directory.name(4).encode()
    said: list[str] = []
    assert directory.steps(said) == [4, 3, 1]
    (sentence,) = said
    assert sentence.endswith(f"{directory.name(2)}/{MANIFEST} could not be read: {directory.why}")
    # It neither counts as one of the two that are kept nor is it removed.
    assert apply_retention(directory.storage, directory.series) == [1]
    assert load(directory.storage, directory.series, Version(1, 4), directory.scratch) == STATE
    with pytest.raises(StateError, match=f"no checkpoint of step 2.*{directory.why}"):
        find_committed(directory.storage, directory.series, Version(1, 2))
    code, out, err = directory.ckpt("ls")
    assert (code, sentence in err) == (1, True)
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["4", "3"]
    code, out, _ = directory.ckpt("show", "3")
    assert (code, "3 of lineage 1" in out) == (0, True)
    code, out, err = directory.ckpt("verify")
    assert (code, out.count("all well"), err.count(sentence)) == (1, 2, 1)
    directory.show(directory.name(2))
    assert directory.steps() == [4, 3, 2]


def test_nothing_is_believed_newer_than_a_newest_that_cannot_be_read(directory: Directory) -> None:
    """The tracker does not go back, and nothing is removed in its place."""
    for step in (1, 2, 3, 4):
        directory.save(step)
    newest = directory.name(4)
    directory.hide(newest)
    said: list[str] = []
    assert directory.steps(said) == [3, 2, 1]
    assert directory.why in said[0]
    with pytest.raises(RejectedError, match=f"nothing is removed.*{newest}.*{directory.why}"):
        apply_retention(directory.storage, directory.series)
    with pytest.raises(RejectedError, match=f"nothing is removed.*{newest}.*{directory.why}"):
        remove_steps(directory.storage, directory.series, {1})
    put_in_order(directory.storage, directory.series)
    directory.save(3)  # Told again, after the one that was told has done it.
    assert directory.storage.get("latest") == newest.encode()
    assert newest in directory.ckpt("verify")[2]
    assert "latest" not in directory.ckpt("verify")[2]
    # A newer one is known to be newer.
    directory.save(5)
    assert directory.storage.get("latest") == directory.name(5).encode()
    assert apply_retention(directory.storage, directory.series) == [1, 2]
    directory.show(newest)
    assert directory.steps() == [5, 4, 3]
    assert load(directory.storage, directory.series, Version(1, 4), directory.scratch) == STATE


def test_training_does_not_begin_from_nothing_beside_what_cannot_be_read(
    directory: Directory,
) -> None:
    directory.save(1)
    directory.hide(directory.name(1))
    with pytest.raises((RejectedError, RetryableError), match=directory.why):
        directory.steps()


def test_a_checkpoint_of_which_a_folder_cannot_be_read_hides_no_other(directory: Directory) -> None:
    """Its manifest can be read, and its files cannot be listed."""
    if not isinstance(directory, Guarded):
        pytest.skip("for folders of another user")
    for step in (1, 2, 3, 4):
        directory.save(step)
    directory.hide(f"{directory.name(3)}/rng")
    assert apply_retention(directory.storage, directory.series) == [1]
    code, out, _ = directory.ckpt("ls")
    assert (code, out.count("complete"), out.count("damaged")) == (1, 2, 1)
    code, out, _ = directory.ckpt("verify")
    assert (code, out.count("all well"), out.count(directory.why)) == (1, 2, 1)


def test_a_storage_that_goes_away_in_a_listing_does_not_end_it_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest are read last: without them training would go back."""
    here = Directory(tmp_path / "ckpt", tmp_path)
    for step in (1, 2, 3):
        here.save(step)
    real, seen = os.open, 0

    def going(path: Any, *words: Any, **named: Any) -> int:
        nonlocal seen
        seen += str(path).endswith(MANIFEST)
        if seen > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", going)
        with pytest.raises(RetryableError, match="Input/output error"):
            here.steps()
    assert seen > 1


def test_an_error_that_passes_at_once_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Directory(tmp_path / "ckpt", tmp_path)
    for step in (1, 2):
        here.save(step)
    real, left = os.open, 2

    def shaky(path: Any, *words: Any, **named: Any) -> int:
        nonlocal left
        if left and str(path).endswith(MANIFEST):
            left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, *words, **named)

    monkeypatch.setattr(os, "open", shaky)
    said: list[str] = []
    assert (here.steps(said), said, left) == ([2, 1], [], 0)
