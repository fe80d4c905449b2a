# SPDX-License-Identifier: Apache-2.0
"""Another node's byte service with one large part on its shelf, beside a plain TCP sender.

Prints both addresses, serves until its standard input ends, and sends the same number of bytes
either way.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.checkpoint.digests import digest_of
from holdfast.checkpoint.peer_server import PeerServer, SlotReader
from holdfast.checkpoint.receivers import Receiver
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.model.checkpoint import Shape, Version, rank_part
from holdfast.model.errors import RejectedError
from holdfast.protocol.checkpoints import PartGet, PartPut

TOKEN = b"benchmark"
VERSION = Version(1, 1)
CHUNK = 4 * 2**20


class OnePart:
    """A shelf with one part, which takes nothing."""

    def __init__(self, slot: Slot, meta: SlotMeta) -> None:
        self._slot = slot
        self._meta = meta
        self._digest = digest_of(slot.data[: meta.data_length])

    @contextmanager
    def reading(self, get: PartGet) -> Iterator[SlotReader]:
        yield SlotReader(self._slot, self._meta, self._digest)

    def receiving(self, put: PartPut) -> contextmanager[Receiver]:  # type: ignore[valid-type]
        raise RejectedError("this shelf is full")


def fill(path: Path, size: int) -> tuple[Slot, SlotMeta]:
    files, length = lay_out([("bytes", size)])
    slot = Slot.create(path, length)
    slot.begin(VERSION)
    block = os.urandom(2**20)
    for start in range(0, size, len(block)):
        slot.data[start : start + len(block)] = block
    meta = SlotMeta("/bench", rank_part(0), VERSION, Shape(1, False), files)
    slot.seal(meta)
    return slot, meta


def send_plainly(server: socket.socket, data: memoryview, size: int) -> None:
    while True:
        peer, _ = server.accept()
        with peer:
            for start in range(0, size, CHUNK):
                peer.sendall(data[start : start + CHUNK])


def main() -> None:
    path, size = Path(sys.argv[1]), int(sys.argv[2])
    slot, meta = fill(path, size)
    plain = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_plainly, args=(plain, slot.data, size), daemon=True).start()
    server = PeerServer("127.0.0.1", TOKEN, None, OnePart(slot, meta))
    print(server.address, plain.getsockname()[1], flush=True)
    sys.stdin.read()
    path.unlink()
    os._exit(0)


if __name__ == "__main__":
    main()
