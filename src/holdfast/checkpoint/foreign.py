# SPDX-License-Identifier: Apache-2.0
"""Knows a directory with checkpoints of DLRover: a job that moves here does not begin at 0.

dlrover_latest.txt   the newest step
<step>/rank_0.pt     what torch.save wrote, a file per rank; or a framework's own files
"""

import re

from holdfast.checkpoint.storage_port import Storage, telling

DLROVER_TRACKER = "dlrover_latest.txt"


def dlrover_step(storage: Storage) -> int | None:
    """The newest step that DLRover has saved there; None if it has saved nothing."""
    with telling(f"{storage.full(DLROVER_TRACKER)} could not be read"):
        raw = storage.get(DLROVER_TRACKER) or b""
    text = raw.strip()
    return int(text) if re.fullmatch(rb"[0-9]{1,18}", text) else None


def find_dlrover(storage: Storage, wanted: int | None, name: str) -> int | None:
    """The newest step that DLRover has saved there, or the wanted one; None if it has not.

    `name`: what a framework calls the folder of the wanted step; DLRover's own is its number.
    """
    newest = dlrover_step(storage)
    if newest is None or wanted in (None, newest):
        return newest
    with telling(f"{storage.full('')} could not be listed"):
        folders = storage.folders("")
    return None if {str(wanted), name}.isdisjoint(folders) else wanted
