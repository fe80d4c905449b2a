# SPDX-License-Identifier: Apache-2.0
"""A note of each running job in the user's runtime folder, so that `holdfast status` finds it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.model.errors import StateError, UsageError
from holdfast.runtime.settings import runtime_root

if TYPE_CHECKING:
    from holdfast.master.process import MasterSettings


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
    temporary = path.with_suffix(".tmp")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(note))
        temporary.chmod(0o600)
        temporary.replace(path)
    except OSError as exc:
        raise StateError(
            f"the note for `holdfast status` cannot be left in {folder} ({exc.strerror}): set "
            "XDG_RUNTIME_DIR to a folder that this user may write"
        ) from exc
    return path


def read_all() -> list[Note]:
    """The notes of masters that are alive, newest first; notes of dead ones are removed."""
    folder = runtime_root() / "jobs"
    found: list[tuple[float, Note]] = []
    for path in folder.glob("*.json"):
        try:
            note = msgspec.json.decode(path.read_bytes(), type=Note)
            os.kill(note.pid, 0)
            found.append((path.stat().st_mtime, note))
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (OSError, msgspec.DecodeError):
            continue
    return [note for _, note in sorted(found, key=lambda item: item[0], reverse=True)]


def find(job: str | None) -> Note:
    """The job of that name, or the only one; UsageError if that is not one job."""
    notes = read_all()
    if job is not None:
        notes = [note for note in notes if note.job == job]
    if not notes:
        raise UsageError(f"no job {job!r} runs here" if job else "no job runs here")
    names = sorted({note.job for note in notes})
    if len(names) > 1:
        raise UsageError(f"several jobs run here; choose one with --job: {', '.join(names)}")
    return notes[0]
