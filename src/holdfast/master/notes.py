# SPDX-License-Identifier: Apache-2.0
"""A note of each running job in the user's runtime folder, so that `holdfast status` finds it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.model.errors import StateError, UsageError
from holdfast.runtime.private import read_private, runtime_folder, write_private
from holdfast.runtime.settings import runtime_root

if TYPE_CHECKING:
    from holdfast.master.process import MasterSettings

NOTE_BYTES_MAX = 64 * 1024


class Note(msgspec.Struct, frozen=True):
    """Where a master can be reached. It holds no secret: the token stays in its file."""

    job: str
    pid: int
    address: str
    http: str
    state: str
    token_file: str


def write(settings: "MasterSettings", address: str, http: str, token_file: Path) -> Path:
    """Leave the note; the path is returned for its removal."""
    folder = runtime_root() / "jobs"
    path = folder / f"{settings.job}.{os.getpid()}.json"
    note = Note(
        job=settings.job,
        pid=os.getpid(),
        address=address,
        http=http,
        state=str(settings.state.absolute()),
        token_file=str(token_file.absolute()),
    )
    try:
        write_private(runtime_folder("jobs") / path.name, msgspec.json.encode(note))
    except (OSError, StateError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise StateError(
            f"the note for `holdfast status` cannot be left in {folder} ({why}): set "
            "XDG_RUNTIME_DIR to a folder that this user may write"
        ) from exc
    return path


def read_all(warn: Callable[[str], None] = lambda sentence: None) -> list[Note]:
    """The notes of masters that are alive, newest first; notes of dead ones are removed.

    A file that another user has put there is not believed, and `warn` is told of it.
    """
    folder = runtime_root() / "jobs"
    found: list[tuple[float, Note]] = []
    try:
        if folder.exists():
            runtime_folder("jobs")
    except (OSError, StateError) as exc:
        warn(f"notes of running jobs are not read: {exc}")
        return []
    for path in sorted(folder.glob("*.json")):
        try:
            note = msgspec.json.decode(read_private(path, NOTE_BYTES_MAX), type=Note)
            os.kill(note.pid, 0)
            found.append((path.lstat().st_mtime, note))
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except StateError as exc:
            warn(str(exc))
        except (OSError, OverflowError, msgspec.DecodeError, UnicodeDecodeError):
            continue
    return [note for _, note in sorted(found, key=lambda item: item[0], reverse=True)]


def find(job: str | None, warn: Callable[[str], None] = lambda sentence: None) -> Note:
    """The job of that name, or the only one; UsageError if that is not one job."""
    notes = read_all(warn)
    if job is not None:
        notes = [note for note in notes if note.job == job]
    if not notes:
        raise UsageError(f"no job {job!r} runs here" if job else "no job runs here")
    names = sorted({note.job for note in notes})
    if len(names) > 1:
        raise UsageError(f"several jobs run here; choose one with --job: {', '.join(names)}")
    return notes[0]
