# SPDX-License-Identifier: Apache-2.0
"""The job's token: a random secret in a private file, never on a command line, never sent."""

import errno
import os
import secrets
import stat
from pathlib import Path

from holdfast.model.errors import AwayError, UsageError
from holdfast.runtime.private import require_own

TOKEN_BYTES = 32

_MISTAKES = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS}
)
"""What can be wrong with a path that a user has named; other errors are the file system's."""


def make_token(path: Path) -> bytes:
    """The token in `path`; a new one, readable only by this user, if the file is missing.

    StateError if another user has made the file: that user would know what guards this user's job.
    (The owner of a job may give its token to people who only use the job.) AwayError if the file
    system has it out of reach.
    """
    try:
        return _made_or_read(path)
    except OSError as exc:
        raise _problem(exc, f"cannot write the token file {path}: {exc.strerror}") from exc


def _made_or_read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        require_own(path.resolve())  # A Secret in a container is a link to where it really is.
        return read_token(path)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(TOKEN_BYTES) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return read_token(path)


def read_token(path: Path) -> bytes:
    """The token in an existing file; UsageError says in one sentence what is wrong with it, and
    AwayError that its file system is in trouble."""
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip().encode()
        # A Secret in a container: its mount decides who sees it, and the program's user, who was
        # not known then, must be able to read it.
        is_mounted = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except FileNotFoundError:
        raise UsageError(f"the token file {path} does not exist") from None
    except UnicodeDecodeError as exc:
        raise UsageError(f"the token file {path} cannot be read: {exc}") from exc
    except OSError as exc:
        raise _problem(exc, f"the token file {path} cannot be read: {exc}") from exc
    forbidden = stat.S_IWGRP | stat.S_IWOTH | stat.S_IROTH
    if stat.S_IMODE(mode) & forbidden and not is_mounted:
        raise UsageError(
            f"the token file {path} is open to other users: run chmod 600 on it, "
            "and make a new token if somebody may have read it"
        )
    if len(token) < 16:
        raise UsageError(f"the token in {path} is shorter than 16 characters")
    return token


def _problem(error: OSError, text: str) -> UsageError | AwayError:
    return UsageError(text) if error.errno in _MISTAKES else AwayError(text)
