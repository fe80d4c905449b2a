# SPDX-License-Identifier: Apache-2.0
"""What the training scripts share: which life this is, how to die in a save, what a state is.

Two lives are of one job. The third is of a new one: the first was killed as a whole in a write.
"""

import hashlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from holdfast.checkpoint.slots import Slot

RANK = int(os.environ["RANK"])
LIFE = 2 if "THIRD_LIFE" in os.environ else int(os.environ["TORCHELASTIC_RESTART_COUNT"])
PAUSE_S = 0.01


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def die_in_the_next_save() -> None:
    """Everything is copied, nothing is sealed: the worst moment."""
    Slot.seal = lambda self, meta: die()  # type: ignore[method-assign]


def hold(folder: str) -> None:
    """Wait for the test, which waits for warm spares: without them a restart imports it all."""
    while not Path(folder, "go").exists():
        threading.Event().wait(PAUSE_S)


def leave() -> NoReturn:
    """End well and at once: to take the libraries apart keeps Python busy for seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def digest(value: object) -> str:
    """A name for a state: equal only if every tensor is equal bit for bit."""
    found = hashlib.sha256()
    _add(found, value)
    return found.hexdigest()


def _add(found: Any, value: object) -> None:
    if isinstance(value, torch.Tensor):
        found.update(repr((value.dtype, value.shape)).encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            found.update(repr(key).encode())
            _add(found, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _add(found, item)
    elif isinstance(value, int | float | str | bytes | bool | None):
        found.update(repr(value).encode())


def note(folder: str, name: str, text: str) -> None:
    Path(folder, f"{name}.rank{RANK}").write_text(text)
