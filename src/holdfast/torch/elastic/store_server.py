# SPDX-License-Identifier: Apache-2.0
"""A process that serves torch's own store for one round: started ahead, so that no worker waits.

Workers of an unmodified script find their process group through torch's TCPStore. If worker rank 0
had to start it, every other worker that comes a moment earlier would be refused and pause for half
a second. A server that is there before the workers, and is new for every round, avoids that.
"""

import os
import signal
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main() -> None:
    """Serve on a port that the kernel chooses, print it, and wait to be ended."""
    store = TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    # Workers that save on SIGTERM may still need it; the agent ends it by SIGKILL.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # In one write: the reader of the port closes the pipe once it has it.
    os.write(1, f"{store.port}\n".encode())
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
