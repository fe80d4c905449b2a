# SPDX-License-Identifier: Apache-2.0
"""Follows a job: what the master tells observers."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

from holdfast.cli.console import Console
from holdfast.model.errors import HoldfastError
from holdfast.protocol import messages as m
from holdfast.runtime.token import read_token
from holdfast.runtime.transport import Link, connect

RETRY_S = 0.5


class Follower:
    """One link to the master on which stories arrive."""

    def __init__(self, on_story: Callable[[m.Story], None]) -> None:
        self._on_story = on_story
        self.lost = asyncio.Event()

    def opened(self, link: Link) -> None:
        raise AssertionError("only servers are told of opened links")

    def received(self, link: Link, frame: m.Frame) -> None:
        if isinstance(frame.body, m.Story):
            self._on_story(frame.body)

    def closed(self, link: Link) -> None:
        self.lost.set()


async def follow(
    address: str,
    token_file: Path,
    on_story: Callable[[m.Story], None],
    *,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Pass on every story, over as many masters as the job has. Runs until it is cancelled."""
    while True:
        try:
            follower = Follower(on_story)
            link = await connect(address, follower, read_token(token_file), tls=tls)
            try:
                link.send(m.Observe(follow=True), 1)
                await follower.lost.wait()
            finally:
                link.close()
        except HoldfastError:
            pass  # The master is not up yet, or down for a moment: its launcher deals with that.
        await asyncio.sleep(RETRY_S)


async def show_status(address: str, token_file: Path, console: Console) -> None:
    """Keep the status line of a terminal up to date."""
    if not console.is_live:
        return

    def on_story(story: m.Story) -> None:
        if story.kind == "Progress":
            console.status(story.text)

    await follow(address, token_file, on_story)
