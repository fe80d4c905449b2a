# SPDX-License-Identifier: Apache-2.0
"""The job's token: a random secret in a private file, never on a command line, never sent."""

import os
import secrets
import stat
from pathlib import Path

from holdfast.model.errors import UsageError

TOKEN_BYTES = 32


def make_token(path: Path) -> bytes:
    """The token in `path`; a new one, readable only by this user, if the file is missing."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as exc:
        raise UsageError(f"cannot write the token file {path}: {exc.strerror}") from exc
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(TOKEN_BYTES) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return read_token(path)


def read_token(path: Path) -> bytes:
    """The token in an existing file; UsageError says in one sentence what is wrong with it."""
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip().encode()
        # A Secret in a container: who sees it was decided by whoever mounted it there, and the
        # program's user, whom nobody knew then, must be able to read it.
        is_mounted = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except FileNotFoundError:
        raise UsageError(f"the token file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"the token file {path} cannot be read: {exc}") from exc
    forbidden = stat.S_IWGRP | stat.S_IWOTH | stat.S_IROTH
    if stat.S_IMODE(mode) & forbidden and not is_mounted:
        raise UsageError(
            f"the token file {path} is open to other users: run chmod 600 on it, "
            "and make a new token if somebody may have read it"
        )
    if len(token) < 16:
        raise UsageError(f"the token in {path} is shorter than 16 characters")
    return token
