# SPDX-License-Identifier: Apache-2.0
"""Real file systems in memory that are too small, for tests that need to run out of one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LIMIT_S = 120.0


@contextmanager
def small_memory(place: Path, options: str) -> Iterator[Path]:
    """A tmpfs with these options at `place`, which is made; the test is skipped without root."""
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"mode=1777,{options}", "holdfast-test", str(place)]
    if subprocess.run(words, check=False, capture_output=True, timeout=LIMIT_S).returncode != 0:
        pytest.skip("needs root to mount a tmpfs")
    try:
        yield place
    finally:
        # Lazily: a process that is about to end may still have something of it open.
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=LIMIT_S)
