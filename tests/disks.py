# SPDX-License-Identifier: Apache-2.0
"""Disks that get full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(at: Path, size: str) -> Iterator[Path]:
    """A file system of its own."""
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount (root, CAP_SYS_ADMIN): {mounted.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Not a byte is left for others."""
    path = disk / "other data"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    path.unlink()
