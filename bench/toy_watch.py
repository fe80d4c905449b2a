# SPDX-License-Identifier: Apache-2.0
"""A process that follows the pods of a namespace and does nothing else, to be measured.

It prints one line when it has listed them, and one with the number of changes whenever it is asked
by a line on its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from holdfast.platforms.kubernetes.api import PODS, Api
from holdfast.platforms.kubernetes.config import Access
from holdfast.platforms.kubernetes.pods import Pod
from holdfast.platforms.kubernetes.watching import Listed, follow


async def main(kubeconfig: Path, namespace: str) -> None:
    changes = 0

    def answer() -> None:
        if not sys.stdin.readline():
            sys.exit(0)
        print(changes, flush=True)

    asyncio.get_running_loop().add_reader(sys.stdin, answer)
    async for item in follow(Api(Access.find(kubeconfig)), PODS, namespace, type=Pod):
        if isinstance(item, Listed):
            print(f"listed {len(item.names)}", flush=True)
            changes = 0
        else:
            changes += 1


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
