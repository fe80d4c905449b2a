# SPDX-License-Identifier: Apache-2.0
"""Files and folders that only this user may have written.

A host may have other users, and what lies in /tmp, /dev/shm or a shared folder may be theirs: a
folder made before ours, a link to a file of ours, a note that leads to their master. So what we
read back must have us as its owner, and be a plain file, not a link to one.
"""

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from holdfast.model.errors import AwayError, StateError
from holdfast.runtime.settings import runtime_root

_READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link is not followed, and a pipe is not waited for."""


def make_private(directory: Path) -> None:
    """A folder that is ours alone, made if missing; StateError if another user made it first."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StateError(f"{directory} is not a directory of this user: somebody else put it there")
    if stat.S_IMODE(found.st_mode) != 0o700:
        directory.chmod(0o700)


def runtime_folder(name: str) -> Path:
    """A folder below the user's runtime folder, both made if missing, and both ours alone."""
    root = runtime_root()
    root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_private(root)
    make_private(root / name)
    return root / name


def write_private(path: Path, content: bytes) -> None:
    """Replace a small file in one move, readable by this user only. Links are not followed."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def open_private(path: Path) -> BinaryIO:
    """A file of ours, to be read; StateError if it is another user's, a link, or no plain file."""
    if path.is_symlink():
        raise StateError(f"{path} is a link, and what it leads to is not read")
    with contextlib.ExitStack() as undo:
        file = undo.enter_context(os.fdopen(os.open(path, _READING), "rb"))
        found = os.fstat(file.fileno())
        if not (stat.S_ISREG(found.st_mode) and _is_ours(found, path.parent)):
            raise StateError(f"{path} is not a file of this user: somebody else put it there")
        undo.pop_all()
        return file


def read_private(path: Path, size_max: int) -> bytes:
    """All of a small file of ours; StateError if it is none, or too large to be ours."""
    with open_private(path) as file:
        content = file.read(size_max + 1)
    if len(content) > size_max:
        raise StateError(f"{path} has more than {size_max} bytes, so it is none of ours")
    return content


def require_own(path: Path) -> None:
    """StateError if there is a link at `path`, or something that another user has put there;
    AwayError if that cannot be told now.

    For folders that a user names: they may be on a server that knows this user by another number,
    or lie in a container that begins as root.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(found.st_mode):
        raise StateError(f"{path} is a link, and what it leads to is not used")
    if _is_ours(found, path.parent):
        return
    raise StateError(
        f"{path} belongs to another user (number {found.st_uid}): if it is yours, change its owner "
        "to the user that runs this; if not, choose another directory"
    )


def require_own_folder(directory: Path) -> None:
    """StateError if another user made a folder that every user may write to.

    Its maker, and any other user, could put other files in the place of ours at any time. A folder
    of a group is used, and so is one like /tmp, where only the owner of a file removes it.
    """
    found = directory.stat()
    is_open = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if is_open and not _is_ours(found, directory):
        raise StateError(
            f"{directory} belongs to another user (number {found.st_uid}), and everybody may write "
            "to it: choose another directory, or make one of your own in it and use that"
        )


def _is_ours(found: os.stat_result, directory: Path) -> bool:
    return found.st_uid in (os.getuid(), 0) or found.st_uid == _own_number(directory)


def _own_number(directory: Path) -> int:
    """The owner that our files get there: a server may know this user by another number."""
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            return os.fstat(probe.fileno()).st_uid
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EPERM):
            return os.getuid()
        raise AwayError(
            f"whose files are in {directory} cannot be told, as none can be made there "
            f"({exc.strerror}): check its disk"
        ) from exc
