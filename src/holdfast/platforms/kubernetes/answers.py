# SPDX-License-Identifier: Apache-2.0
"""What a Kubernetes API server answers: objects, lists, events of a watch, and refusals.

The type of an error says what to do next: *the object does not exist* is not the same as *the
server did not answer*.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

import msgspec

from holdfast.model.errors import RejectedError, RetryableError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # A caller that gives no type gets plain dicts.
    T = TypeVar("T", default=dict[str, Any])
else:
    from typing import TypeVar

    T = TypeVar("T")


class Refusal(RejectedError):
    """The server understood and said no."""

    def __init__(self, text: str, status: int = 0, reason: str = "") -> None:
        super().__init__(text)
        self.status = status
        """The HTTP status."""
        self.reason = reason
        """The server's word for the reason, e.g. "AlreadyExists"."""


class NotFound(Refusal):
    """The object certainly does not exist."""


class Conflict(Refusal):
    """The object exists already, or another client has changed it meanwhile."""


class Expired(Refusal):
    """The server no longer knows this point in time: list again."""


class Rejected(Refusal):
    """The request is malformed, or not allowed. Repeating it does not help by itself."""


class Unavailable(RetryableError):
    """There was no answer: it is unknown whether the server carried out the request."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s
        """How long the server asked the client to wait."""


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    """The metadata that every object has."""

    resource_version: str = ""
    name: str = ""
    namespace: str = ""
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """All objects at one point in time."""

    items: list[T]
    metas: list[Meta]
    """The metadata of each item, in the same order."""
    resource_version: str


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """One event of a watch."""

    verb: str
    """ADDED, MODIFIED, DELETED, or BOOKMARK: nothing changed up to this version."""
    obj: T | None
    """The object as it is now, or as it was last; None in a bookmark."""
    meta: Meta


class Described(msgspec.Struct):
    metadata: Meta = Meta()


class _PageMeta(msgspec.Struct, rename={"resource_version": "resourceVersion"}, kw_only=True):
    resource_version: str = ""
    next: str = msgspec.field(default="", name="continue")


class Page(msgspec.Struct):
    metadata: _PageMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Details(msgspec.Struct, rename="camel"):
    retry_after_seconds: float = 0.0


class Status(msgspec.Struct):
    message: str = ""
    reason: str = ""
    code: int = 0
    details: _Details | None = None


def error_of(status: Status, code: int, retry_after_s: float = 0.0) -> Exception:
    """The error that says what to do next."""
    details = status.details or _Details()
    text = f"the API server says: {status.message or status.reason or 'nothing'} ({code})"
    # 401: the next request comes with a token that is read again.
    if code in (401, 408, 429) or code >= 500:
        return Unavailable(text, retry_after_s or details.retry_after_seconds)
    kinds = {404: NotFound, 409: Conflict, 410: Expired}
    return kinds.get(code, Rejected)(text, code, status.reason)


def read_change(line: bytes, type: type[T]) -> Change[T]:
    event = decode(line, _Event)
    if event.type == "ERROR":
        status = decode(event.object, Status)
        raise error_of(status, status.code)
    meta = decode(event.object, Described).metadata
    if event.type == "BOOKMARK":
        return Change(event.type, None, meta)
    return Change(event.type, decode(event.object, type), meta)


def decode(data: bytes | msgspec.Raw, type: type[T]) -> T:
    try:
        decoded: T = msgspec.json.decode(data, type=type)
        return decoded
    except msgspec.DecodeError as exc:
        # A proxy between this client and the server may have answered in its place.
        raise Unavailable(f"the API server's answer cannot be understood: {exc}") from exc
