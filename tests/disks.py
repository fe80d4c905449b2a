# SPDX-License-Identifier: Apache-2.0
"""Real file systems that are too small, for tests that need to run out of one."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

LIMIT_S = 120.0


@contextmanager
def small_disk(place: Path, options: str) -> Iterator[Path]:
    """A tmpfs with these options at `place`, which is made; the test is skipped without root."""
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"mode=1777,{options}", "holdfast-test", str(place)]
    made = subprocess.run(words, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    if made.returncode != 0:
        pytest.skip(f"needs the right to mount (root, CAP_SYS_ADMIN): {made.stderr.strip()}")
    try:
        yield place
    finally:
        # Lazily: a process that is about to end may still have something of it open.
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=LIMIT_S)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Not a byte is left for others."""
    path = disk / "other data"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    path.unlink()


def remove_slots(memory: Path) -> None:
    """What other programs do to `/dev/shm`; in one move, as the agent may write there just now."""
    (folder,) = memory.glob("holdfast-*")
    aside = memory / "removed"
    folder.rename(aside)
    shutil.rmtree(aside)
