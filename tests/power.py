# SPDX-License-Identifier: Apache-2.0
"""A disk that can lose its power: a file system in a file, for tests of what is durable."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SIZE = 32 * 1024 * 1024
LIMIT_S = 120.0


class Disk:
    """What is in its file is what a machine without power has left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._image = folder / "disk.img"
        self.path = folder / "disk"
        self.path.mkdir()
        with self._image.open("wb") as opened:
            opened.truncate(SIZE)

    def begin(self) -> bool:
        """Make the file system and mount it; False if that cannot be done here."""
        words = ["mkfs.ext4", "-q", "-F", str(self._image)]
        try:
            done = subprocess.run(words, capture_output=True, timeout=LIMIT_S, check=False)
        except FileNotFoundError:
            return False
        return done.returncode == 0 and _mount(self._image, self.path)

    @contextmanager
    def after_a_loss_of_power(self) -> Iterator[Path]:
        """The same disk as the next start finds it: without what the kernel held back for later."""
        copy, place = self._folder / "copy.img", self._folder / "after"
        place.mkdir()
        shutil.copy(self._image, copy)
        assert _mount(copy, place)
        try:
            yield place
        finally:
            _unmount(place)


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """A mounted one. The test is skipped where none can be mounted."""
    made = Disk(folder)
    if not made.begin():
        pytest.skip("needs root, mkfs.ext4 and loop devices")
    try:
        yield made
    finally:
        _unmount(made.path)


def _mount(image: Path, place: Path) -> bool:
    words = ["mount", "-o", "loop", str(image), str(place)]
    return subprocess.run(words, capture_output=True, timeout=LIMIT_S, check=False).returncode == 0


def _unmount(place: Path) -> None:
    subprocess.run(["umount", str(place)], check=True, timeout=LIMIT_S)
