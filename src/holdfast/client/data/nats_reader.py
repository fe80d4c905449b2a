# SPDX-License-Identifier: Apache-2.0
"""Streams of NATS JetStream: a partition is a JetStream stream, an offset its sequence number.

JetStream numbers the messages of a stream 1, 2, 3... and never uses a number again, which is what
the ledger of shards needs. Messages are read by number, through consumers that live for one
request: the broker keeps no record of readers.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from holdfast.model.errors import StateError, TimedOutError, UsageError

__all__ = ["NatsReader"]

AT_ONCE = 128
"""Messages in one request. A message can have a megabyte, and two requests are in memory."""
TRY_S = 5.0
"""After this without an answer a request is sent again."""
PAUSE_S = 0.2
"""Between a request that failed and the next, and between attempts to connect."""
NO_ANSWER = "there was no answer"
TIME_IS_OVER = "408"
"""The broker's status for a request that has waited long enough."""
NO_STREAM = 10059
"""The broker's number for a stream that does not exist."""
IDLE_S = 30.0
"""After this the broker forgets a consumer whose process has died."""

Result = TypeVar("Result")
Attempt = Callable[[Client], Awaitable[Result]]

log = logging.getLogger(__name__)


class NatsReader:
    """A StreamReader of some streams of NATS JetStream."""

    origin = 1

    def __init__(
        self,
        servers: str | Sequence[str],
        streams: Sequence[str],
        *,
        timeout_s: float = 300.0,
        **options: Any,
    ) -> None:
        """`streams` are the partitions. `options` are those of `nats.connect`: user, tls, ...

        `timeout_s`: how long a broker that is away is waited for.
        """
        if not streams or len(set(streams)) != len(streams):
            raise UsageError(f"a stream needs partitions, each named once, not {list(streams)}")
        self._servers = [servers] if isinstance(servers, str) else list(servers)
        self._partitions, self._timeout_s, self._options = tuple(streams), timeout_s, options
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._pid = os.getpid()
        self._is_closed = False

    def partitions(self) -> tuple[str, ...]:
        return self._partitions

    def ends(self) -> dict[str, int]:
        what = f"the ends of {', '.join(self._partitions)}"
        return _result(self._submit(self._ends, what, self._timeout_s))

    def wait_until(self, ends: Mapping[str, int], timeout_s: float) -> dict[str, int]:
        async def attempt(client: Client) -> dict[str, int]:
            present = await self._ends(client)
            if not any(present[name] >= end for name, end in ends.items()):
                reached = [
                    asyncio.ensure_future(_reach(client, name, present[name], end))
                    for name, end in ends.items()
                ]
                await _first_of(reached, timeout_s)
            return await self._ends(client)

        what = f"the growth of {', '.join(ends)}"
        return _result(self._submit(attempt, what, timeout_s + self._timeout_s))

    def read(self, partition: str, begin: int, end: int) -> Generator[bytes, None, None]:
        begins = range(begin, end, AT_ONCE)
        ahead = self._fetch(partition, begin, min(begin + AT_ONCE, end))
        try:
            for start in begins:
                records = _result(ahead)
                if start != begins[-1]:
                    following = start + AT_ONCE
                    ahead = self._fetch(partition, following, min(following + AT_ONCE, end))
                yield from records
        finally:
            ahead.cancel()

    def close(self) -> None:
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection, self._is_closed = None, True

    # ---- requests -------------------------------------------------------------------------------

    def _fetch(self, partition: str, begin: int, end: int) -> "Future[list[bytes]]":
        async def attempt(client: Client) -> list[bytes]:
            return await _messages(client, partition, begin, end)

        what = f"the records {begin} to {end - 1} of {partition!r}"
        return self._submit(attempt, what, self._timeout_s)

    async def _ends(self, client: Client) -> dict[str, int]:
        broker = client.jetstream(timeout=TRY_S)
        infos = await asyncio.gather(*(broker.stream_info(name) for name in self._partitions))
        last = [info.state.last_seq for info in infos]
        return {name: n + 1 for name, n in zip(self._partitions, last, strict=True)}

    def _submit(self, attempt: Attempt[Result], what: str, timeout_s: float) -> "Future[Result]":
        if self._pid != os.getpid():
            # In a forked child the threads are missing, and one of them may have had the lock.
            self._lock, self._connection, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._is_closed:
                raise UsageError("this reader was closed")
            if self._connection is None:
                self._connection = _Connection(self._servers, self._options)
            return self._connection.submit(attempt, what, timeout_s)


def _result(request: "Future[Result]") -> Result:
    try:
        return request.result()
    except CancelledError as cancelled:
        raise UsageError("this reader was closed while somebody used it") from cancelled


async def _messages(client: Client, partition: str, begin: int, end: int) -> list[bytes]:
    """The messages with these numbers."""
    found: list[bytes] = []
    while (at := begin + len(found)) < end:
        messages = await _pull(client, partition, at, end, TRY_S)
        if not messages:
            raise NatsError(f"it is not written up to {end - 1} yet")
        for missing, message in enumerate(messages, start=at):
            number = message.metadata.sequence.stream
            if number != missing:
                state = (await client.jetstream().stream_info(partition)).state
                raise StateError(
                    f"the records {missing} to {min(number, end) - 1} of {partition!r} are "
                    f"gone: the broker has {state.messages} records of it, from "
                    f"{state.first_seq} to {state.last_seq}"
                )
            found.append(message.data)
    return found


async def _reach(client: Client, partition: str, present: int, end: int) -> None:
    """Return when the partition ends there; the messages themselves stay with the broker."""
    while present < end:
        upto = min(present + AT_ONCE, end)
        for message in await _pull(client, partition, present, upto, IDLE_S, headers_only=True):
            present = message.metadata.sequence.stream + 1


async def _pull(
    client: Client,
    partition: str,
    begin: int,
    end: int,
    timeout_s: float,
    *,
    headers_only: bool = False,
) -> list[Msg]:
    """The messages from `begin` to before `end`, or those that there are after the time.

    If some of them are gone there are others instead, with higher numbers. The library's `fetch`
    takes three times as much CPU for each message.
    """
    broker, found = client.jetstream(timeout=TRY_S), list[Msg]()
    config = ConsumerConfig(
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=begin,
        ack_policy=AckPolicy.NONE,
        inactive_threshold=IDLE_S,
        mem_storage=True,
        headers_only=headers_only,
    )
    consumer = (await broker.add_consumer(partition, config)).name
    answered = asyncio.get_running_loop().create_future()

    async def take(message: Msg) -> None:
        # Without a subject for replies it is the broker's status for the request: its time is over.
        is_last = not message.reply or message.metadata.sequence.stream >= end - 1
        if message.reply:
            found.append(message)
        if is_last and not answered.done():
            answered.set_result(message)

    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, cb=take)
    try:
        request = {"batch": end - begin, "expires": int(timeout_s * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{partition}.{consumer}"
        await client.publish(subject, json.dumps(request).encode(), inbox)
        last = await asyncio.wait_for(answered, timeout_s + TRY_S)
    finally:
        with suppress(NatsError):
            await subscription.unsubscribe()
    status = (last.headers or {}).get("Status", "")
    if not last.reply and status != TIME_IS_OVER:
        raise NatsError(f"the broker answered with status {status}")
    # After a failure the broker forgets it by itself, and it may have done so already.
    with suppress(NotFoundError):
        await broker.delete_consumer(partition, str(consumer))
    return found


async def _first_of(tasks: Sequence["asyncio.Future[Any]"], timeout_s: float | None) -> None:
    """Return when the first is done, or after the time; raise if it failed. The others end."""
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Connection:
    """One connection to the broker, with a thread that answers its pings and connects again."""

    def __init__(self, servers: list[str], options: dict[str, Any]) -> None:
        self._servers, self._options = servers, options
        self._client: Client | None = None
        self._connecting = asyncio.Lock()
        #: Set when there is a new connection: requests on the one before will not be answered.
        self._is_new = asyncio.Event()
        self._problem = "no connection"
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-nats", daemon=True)
        self._thread.start()

    def submit(self, attempt: Attempt[Result], what: str, timeout_s: float) -> "Future[Result]":
        """Try until it works; at once again when the broker is back."""
        return asyncio.run_coroutine_threadsafe(
            self._patiently(attempt, what, timeout_s), self._loop
        )

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(2 * TRY_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        await self._ending.wait()
        if self._client is not None:
            # The library cannot always say goodbye to a broker that is away.
            with suppress(NatsError, OSError, asyncio.CancelledError):
                await asyncio.wait_for(self._client.close(), TRY_S)

    async def _patiently(self, attempt: Attempt[Result], what: str, timeout_s: float) -> Result:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await self._once(attempt)
                    except (NatsError, OSError) as error:
                        if isinstance(error, NotFoundError) and error.err_code == NO_STREAM:
                            raise UsageError(f"there is no stream for {what}") from error
                        self._problem = str(error) or type(error).__name__
                        # Right after a start the broker refuses for a moment.
                        await asyncio.sleep(PAUSE_S)
        except TimeoutError as late:
            raise TimedOutError(
                f"{what} could not be had from {', '.join(self._servers)} within {timeout_s:g} s: "
                f"{self._problem}"
            ) from late

    async def _once(self, attempt: Attempt[Result]) -> Result:
        client = await self._connected()
        asked = asyncio.ensure_future(attempt(client))
        is_new = asyncio.ensure_future(self._is_new.wait())
        await _first_of([asked, is_new], None)
        if asked.cancelled():
            raise ConnectionResetError("the connection was lost")
        return asked.result()

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is None:
                client = Client()
                await client.connect(
                    **{
                        "servers": self._servers,
                        "max_reconnect_attempts": -1,
                        "reconnect_time_wait": PAUSE_S,
                        "ping_interval": IDLE_S,
                        **self._options,
                        "error_cb": self._on_error,
                        "disconnected_cb": self._on_loss,
                        "reconnected_cb": self._on_return,
                    }
                )
                self._client, self._problem = client, NO_ANSWER
            return self._client

    async def _on_error(self, error: Exception) -> None:
        self._problem = str(error) or type(error).__name__

    async def _on_loss(self) -> None:
        if not self._ending.is_set():
            log.warning("lost the broker at %s: %s", ", ".join(self._servers), self._problem)

    async def _on_return(self) -> None:
        log.warning("the broker at %s is back", ", ".join(self._servers))
        self._problem = NO_ANSWER
        self._is_new.set()
        self._is_new = asyncio.Event()
