# SPDX-License-Identifier: Apache-2.0
"""Follow all objects of a kind forever: a list, then every change, through outages of any length.

After an outage it goes on from the last version that it has seen. If the server no longer knows
that version, it lists again and reports what has gone meanwhile. While the server does not answer,
it reports nothing about any object: an object that cannot be looked up is unknown, not gone.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Generic

from holdfast.model.errors import RejectedError, RetryableError
from holdfast.platforms.kubernetes.answers import Change, Expired, Listing, Meta, T
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.kinds import Kind
from holdfast.platforms.kubernetes.pauses import Pauses
from holdfast.runtime.observe import Say

SOUND_S = 30.0
"""A watch that lasted this long was no failure, even if nothing happened in it."""
PAGE = 250
"""Smaller pages than the default of lists: a page is in memory as a whole."""

Name = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """An object as it is now, or, if it is gone, as it was last."""

    obj: T
    meta: Meta
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Listed:
    """Every object has been reported: objects without a name in this list do not exist."""

    names: frozenset[Name]


async def follow(
    api: Api,
    kind: Kind,
    namespace: str | None = None,
    *,
    labels: str = "",
    fields: str = "",
    type: type[T] = dict,  # type: ignore[assignment]
    say: Say | None = None,
) -> AsyncGenerator[Seen[T] | Listed, None]:
    """All objects, `Listed`, and every change; never ends. `say` reports each outage once."""
    known: dict[Name, Seen[T]] = {}
    version = ""
    patience = _Patience(kind, say)
    while True:
        began = asyncio.get_running_loop().time()
        try:
            if not version:
                listing = await api.list(
                    kind, namespace, labels=labels, fields=fields, limit=PAGE, type=type
                )
                patience.answered()
                for seen in _compare(known, listing):
                    yield seen
                yield Listed(frozenset(known))
                version = listing.resource_version
            watch = api.watch(
                kind,
                namespace,
                resource_version=version,
                labels=labels,
                fields=fields,
                type=type,
                opened=patience.answered,
            )
            async with aclosing(watch) as changes:
                async for change in changes:
                    version = change.meta.resource_version
                    patience.renew()
                    if change.obj is not None:
                        yield _note(known, change, change.obj)
        except Expired:
            version = ""
        except (RetryableError, RejectedError) as exc:
            patience.failed(exc)
        if asyncio.get_running_loop().time() - began > SOUND_S:
            patience.renew()
        await patience.pause()


def _compare(known: dict[Name, Seen[T]], listing: Listing[T]) -> list[Seen[T]]:
    """What a list reports: first the objects that are gone, then the others. Updates `known`."""
    there = [Seen(obj, meta) for obj, meta in zip(listing.items, listing.metas, strict=True)]
    # By uid: another object of the same name may have taken its place.
    uids = {seen.meta.uid for seen in there}
    gone = [replace(seen, gone=True) for seen in known.values() if seen.meta.uid not in uids]
    known.clear()
    known.update({(seen.meta.namespace, seen.meta.name): seen for seen in there})
    return gone + there


def _note(known: dict[Name, Seen[T]], change: Change[T], obj: T) -> Seen[T]:
    name = (change.meta.namespace, change.meta.name)
    seen = Seen(obj, change.meta, gone=change.verb == "DELETED")
    if seen.gone:
        known.pop(name, None)
    else:
        known[name] = seen
    return seen


class _Patience:
    """How long to wait before the next try, and what to tell people meanwhile."""

    def __init__(self, kind: Kind, say: Say | None) -> None:
        self._what = kind.plural
        self._say = say
        self._pauses = Pauses()
        self._error: Exception | None = None
        self._failing_since: float | None = None

    def failed(self, exc: Exception) -> None:
        """The server did not answer, or refused."""
        self._error = exc
        if self._failing_since is None:
            self._failing_since = asyncio.get_running_loop().time()
            self._tell(f"{self._what} cannot be watched, trying again until they can: {exc}")

    def answered(self) -> None:
        """The server answered the request."""
        if self._failing_since is not None:
            took_s = asyncio.get_running_loop().time() - self._failing_since
            self._failing_since = None
            self._tell(f"{self._what} are watched again after {took_s:.0f} s")

    def renew(self) -> None:
        """All is well: the next pause is short again."""
        self._pauses.renew()

    async def pause(self) -> None:
        pause_s = self._pauses.after(self._error)
        self._error = None
        await asyncio.sleep(pause_s)

    def _tell(self, text: str) -> None:
        if self._say is not None:
            self._say(text)
