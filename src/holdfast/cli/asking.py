# SPDX-License-Identifier: Apache-2.0
"""How a command finds the master of a job, and asks it what the job does."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from holdfast.cli.run_options import parse_address
from holdfast.master import notes
from holdfast.master.view import JobView
from holdfast.model.errors import (
    HoldfastError,
    ProtocolError,
    RejectedError,
    RetryableError,
    UsageError,
)
from holdfast.protocol import messages as m
from holdfast.runtime.settings import environment
from holdfast.runtime.tls import client_tls
from holdfast.runtime.token import read_token
from holdfast.runtime.transport import Link, connect

BACK_S = 30.0
"""How long to wait for a master that is gone: a launcher starts the next one within seconds."""

RETRY_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that select the job."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--job", metavar="NAME", help="a job that runs on this machine")
    which.add_argument("--state", type=Path, metavar="DIR", help="the job of this state directory")
    which.add_argument("--master", metavar="HOST:PORT", help="a master anywhere")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the job's token, for --master (default HOLDFAST_TOKEN_FILE)",
    )
    parser.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="authority of the master's certificate (PEM)"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="seconds to wait for the master (default 5)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds above 0, not {text!r}")
    return seconds


# ---- finding the master --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    address: str
    token_file: Path
    tls_ca: Path | None
    http: str = ""
    """The address of its HTTP side; empty if that is off or unknown."""


def target_of(arguments: argparse.Namespace) -> Target:
    if arguments.master is not None:
        parse_address(arguments.master, "--master")
        token_file = arguments.token_file or environment().get("HOLDFAST_TOKEN_FILE")
        if not token_file:
            raise UsageError("--master needs --token-file FILE (or HOLDFAST_TOKEN_FILE)")
        return Target(arguments.master, Path(token_file), arguments.tls_ca)
    if arguments.state is not None:
        note = _note_of(arguments.state)
    else:
        note = notes.find(arguments.job, _warn)
    token_file = arguments.token_file or Path(note.token_file)
    return Target(note.address, token_file, arguments.tls_ca, note.http)


def _note_of(state: Path) -> notes.Note:
    if not state.is_dir():
        raise UsageError(f"--state {state} is not a directory")
    for note in notes.read_all(_warn):
        if Path(note.state).resolve() == state.resolve():
            return note
    raise RetryableError(f"no master runs on {state} on this machine")


def _warn(sentence: str) -> None:
    print(f"holdfast: {sentence}", file=sys.stderr)


# ---- asking it -----------------------------------------------------------------------------------


class _Observer:
    """The client's end of the link: its answers, and stories until the link ends."""

    def __init__(self) -> None:
        self._answers: dict[int, asyncio.Future[m.AnyMessage]] = {}
        self.stories: asyncio.Queue[m.Story | None] = asyncio.Queue()

    def opened(self, link: Link) -> None:
        """Never called: only servers hear of new links."""

    async def ask(self, link: Link, body: m.AnyMessage) -> m.AnyMessage:
        call = len(self._answers) + 1
        answer: asyncio.Future[m.AnyMessage] = asyncio.get_running_loop().create_future()
        self._answers[call] = answer
        link.send(body, call)
        return await answer

    def received(self, link: Link, frame: m.Frame) -> None:
        answer = self._answers.get(frame.call)
        if isinstance(frame.body, m.Story):
            self.stories.put_nowait(frame.body)
        elif answer is not None and not answer.done():
            answer.set_result(frame.body)
        else:
            raise ProtocolError(f"{type(frame.body).__name__} came to an observer")

    def closed(self, link: Link) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RetryableError("the master hung up before it answered"))
        self.stories.put_nowait(None)


async def watch(
    target: Target,
    timeout_s: float,
    show: Callable[[bytes], None],
    tell: Callable[[m.Story], None] | None,
) -> None:
    """Show the state; with `tell`, tell every story after it until the job or the link ends."""
    async with _asking(target, timeout_s, m.Observe(follow=tell is not None)) as (
        observer,
        observed,
    ):
        assert isinstance(observed, m.Observed)
        show(observed.state)
        if tell is not None:
            await _tell_all(observer, tell)


async def history(target: Target, timeout_s: float, entity: str) -> m.History:
    """What the master has told of an entity."""
    async with _asking(target, timeout_s, m.HistoryAsk(entity)) as (_, found):
        assert isinstance(found, m.History)
        return found


async def end(
    target: Target,
    timeout_s: float,
    reason: str,
    tell: Callable[[m.Story], None],
    *,
    back_s: float = BACK_S,
) -> None:
    """End the job, and tell what happens until its master has sent its last word.

    RetryableError if that never comes: then it is unknown whether the nodes have saved. The end of
    the link is no proof, because a master may be killed while they save.
    """
    follow = m.Observe(follow=True)
    async with _asking(target, timeout_s, follow, m.StopJob(reason)) as (observer, _):
        word = await _last_word(observer, tell)
    loop = asyncio.get_running_loop()
    if word is None:
        _warn("the master is gone before its last word; waiting for the next one")
        give_up_at = loop.time() + back_s
        while word is None and loop.time() < give_up_at:
            await asyncio.sleep(RETRY_S)
            with suppress(RetryableError):
                async with _asking(target, timeout_s, follow) as (observer, _):
                    # The decision is in the master's journal: do not ask the next one to stop.
                    word = await _last_word(observer, tell)
                    give_up_at = loop.time() + back_s
        if word is None:
            raise RetryableError(
                "its master is gone; the job was told to end and may still be saving"
            )
    if word.text:
        raise RetryableError(
            "the job was told to end, but some of what was in memory may not be on storage: "
            f"{word.text}"
        )


async def _last_word(observer: _Observer, tell: Callable[[m.Story], None]) -> m.Story | None:
    while (story := await observer.stories.get()) is not None:
        if story.kind == m.LAST_WORD:
            return story
        if story.kind != "Progress":
            tell(story)
    return None


@asynccontextmanager
async def _asking(
    target: Target, timeout_s: float, *requests: m.AnyMessage
) -> AsyncIterator[tuple[_Observer, m.AnyMessage]]:
    """A link on which these requests have been answered, with the last answer."""
    token, tls = read_token(target.token_file), client_tls(target.tls_ca)
    observer = _Observer()
    answer: m.AnyMessage = m.Done()
    try:
        async with asyncio.timeout(timeout_s):
            link = await connect(target.address, observer, token, tls=tls, timeout_s=timeout_s)
            for request in requests:
                answer = await observer.ask(link, request)
                if isinstance(answer, m.Refused):
                    raise RejectedError(answer.message)
    except TimeoutError:
        raise _unreachable(target, f"no answer within {timeout_s:g} s") from None
    except HoldfastError as exc:
        raise _unreachable(target, str(exc).removeprefix(f"{target.address}: ")) from exc
    try:
        yield observer, answer
    finally:
        link.abort()


async def _tell_all(observer: _Observer, tell: Callable[[m.Story], None]) -> None:
    while (story := await observer.stories.get()) is not None:
        if story.kind == "Progress":
            continue  # Once a second: for a status line, not for a list of events.
        if story.kind == m.LAST_WORD:
            return  # This link began after the job had finished, and its nodes have saved.
        tell(story)
        if story.kind == "JobFinished":
            return
    raise RetryableError("the master is gone, but its job may go on: ask again when it is back")


def _unreachable(target: Target, why: str) -> RetryableError:
    hint = ""
    if target.tls_ca is None and ("no answer" in why or "broke" in why):
        hint = "; if it uses TLS, give --tls-ca FILE"
    return RetryableError(f"cannot reach the master at {target.address}: {why}{hint}")


def ask(target: Target, timeout_s: float) -> bytes:
    """The state of the job, as JSON."""
    states: list[bytes] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(watch(target, timeout_s, states.append, None))
    return states[0]


def decode(state: bytes) -> JobView:
    """The state, decoded for commands that show parts of it."""
    try:
        return msgspec.json.decode(state, type=JobView)
    except msgspec.DecodeError as exc:
        raise ProtocolError(f"the master's state cannot be understood: {exc}") from exc
