# SPDX-License-Identifier: Apache-2.0
"""torch's Store on the key-value store of the job, which no single rank hosts.

A TCPStore dies with rank 0's process. This one outlives every worker, every node and the master:
requests that meet a restart are repeated and take effect once. Everything else is as in TCPStore;
tests/contract/test_store.py runs one suite on both, and docs/store.md lists the differences.
"""

import operator
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from holdfast.client.connection import LONGEST_WAIT_S, AgentClient, current
from holdfast.model.errors import HoldfastError, RetryableError, TimedOutError
from holdfast.protocol import messages as m
from holdfast.runtime.settings import environment

if TYPE_CHECKING:  # torch.distributed has it, but does not declare it.
    from torch._C._distributed_c10d import Store
else:
    Store = dist.Store

DEFAULT_TIMEOUT = timedelta(seconds=300)

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1

#: torch 2.6 has no queues, and so no error for them.
QueueEmptyError: type[Exception] = getattr(dist, "QueueEmptyError", dist.DistStoreError)

# When only C++ still refers to a store (a PrefixStore around it, a process group), Python still
# collects its half of the object, and the next call from C++ fails.
_alive: list["HoldfastStore"] = []

Expected = TypeVar("Expected", bound=m.Message)


class HoldfastStore(Store):
    """A `torch.distributed.Store` that survives the loss of any process of the job.

    C++ calls these methods too, through pybind11: it passes values as bytes and takes bytes back.
    """

    def __init__(self, client: AgentClient, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__()
        self._client = client
        self.set_timeout(timeout)
        _alive.append(self)

    def clone(self) -> "HoldfastStore":
        """The same keys, with a separate time-out."""
        return HoldfastStore(self._client, self._timeout())

    # ---- one key --------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(m.KvSet(self._client.scope, _key(key), _bytes(value)), m.Done)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        amount = operator.index(value)
        if not _INT64_MIN <= amount <= _INT64_MAX:
            raise TypeError(f"{amount} does not fit into 64 bits")
        return self._ask(m.KvAdd(self._client.scope, _key(key), amount), m.Number).number

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        request = m.KvCompareSet(
            self._client.scope, _key(key), _bytes(expected_value), _bytes(desired_value)
        )
        return self._ask(request, m.Value).value

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(m.KvAppend(self._client.scope, _key(key), _bytes(value)), m.Done)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(m.KvDelete(self._client.scope, _key(key)), m.Number).number)

    # ---- many keys ------------------------------------------------------------------------------

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = _seconds(self._timeout() if timeout is None else timeout)
        request = m.KvWait(self._client.scope, _keys(keys), limit_s)
        self._ask_in(limit_s, request, m.Done)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(m.KvCheck(self._client.scope, _keys(keys)), m.Number).number)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        limit_s = _seconds(self._timeout())
        request = m.KvGet(self._client.scope, _keys(keys), limit_s)
        return list(self._ask_in(limit_s, request, m.Values).values)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        encoded = tuple(_bytes(value) for value in values)
        self._ask(m.KvMultiSet(self._client.scope, _keys(keys), encoded), m.Done)

    def num_keys(self) -> int:
        return self._ask(m.KvCount(self._client.scope), m.Number).number

    def list_keys(self) -> list[str]:
        return list(self._ask(m.KvKeys(self._client.scope), m.Keys).keys)

    def has_extended_api(self) -> bool:
        return True

    # ---- queues ---------------------------------------------------------------------------------

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._ask(m.QueuePush(self._client.scope, _key(key), _bytes(value)), m.Number)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        limit_s = _seconds(self._timeout()) if block else 0.0
        request = m.QueuePop(self._client.scope, _key(key), limit_s)
        try:
            return self._ask_in(limit_s, request, m.Value).value
        except dist.DistStoreError as exc:
            if not block and isinstance(exc.__cause__, TimedOutError):
                raise QueueEmptyError("queue is empty") from exc
            raise

    def queue_len(self, key: str) -> int:
        return self._ask(m.QueueLength(self._client.scope, _key(key)), m.Number).number

    # C++ looks these two up under their C++ names.
    deleteKey = delete_key
    getNumKeys = num_keys

    # ---- the way to the agent -------------------------------------------------------------------

    def _timeout(self) -> timedelta:
        # Kept in the C++ half, where a PrefixStore sets it directly; torch's stub does not list it.
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]
        return timeout

    def _ask(self, request: m.KvCall, expected: type[Expected]) -> Expected:
        return self._ask_in(_seconds(self._timeout()), request, expected)

    def _ask_in(self, limit_s: float, request: m.KvCall, expected: type[Expected]) -> Expected:
        """The answer, or the error that a TCPStore would raise."""
        try:
            return self._client.ask(request, expected, limit_s)
        except TimedOutError as exc:
            raise dist.DistStoreError(_too_late(request, limit_s)) from exc
        except RetryableError as exc:
            raise dist.DistNetworkError(str(exc)) from exc
        except HoldfastError as exc:
            raise dist.DistStoreError(str(exc)) from exc


def _key(key: str | bytes) -> str:
    if isinstance(key, bytes | bytearray):
        return key.decode()
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str, not {type(key).__name__}")
    return key


def _keys(keys: Sequence[str]) -> tuple[str, ...]:
    if isinstance(keys, str | bytes):
        raise TypeError("a list of keys is needed, not one key")
    return tuple(_key(key) for key in keys)


def _bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"a value must be a str or bytes, not {type(value).__name__}")
    return bytes(value)


def _seconds(timeout: timedelta | float) -> float:
    """pybind11 takes seconds as a float too. Less than zero means without a limit."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return min(seconds, LONGEST_WAIT_S) if seconds >= 0 else LONGEST_WAIT_S


def _too_late(request: m.KvCall, limit_s: float) -> str:
    """The same words as TCPStore's, which scripts look for in logs."""
    keys = request.keys if isinstance(request, m.KvGet | m.KvWait) else ()
    if isinstance(request, m.QueuePop):
        keys = (request.key,)
    return f"wait timeout after {limit_s * 1000:.0f}ms, keys: {', '.join(keys)}"


def _rendezvous(
    url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: object
) -> Iterator[tuple[Store, int, int]]:
    """torch's handler of holdfast://: the round's store, and the rank from the agent."""
    client = current()
    if client is None:
        raise ValueError(
            "Error initializing torch.distributed using holdfast:// rendezvous: this process was "
            "not started by Holdfast; run it with `holdfast run`"
        )
    given = dict(parse_qsl(urlsplit(url).query))
    rank, world_size = _place(given, "rank"), _place(given, "world_size")
    yield HoldfastStore(client, timeout), rank, world_size
    raise RuntimeError("a holdfast:// store is given out once: a new world comes as a new round")


def _place(given: dict[str, str], name: str) -> int:
    """The value from the caller of init_process_group; otherwise the environment's."""
    number = int(given.get(name, "-1"))
    if number >= 0:
        return number
    variable = name.upper()
    value = environment().get(variable)
    if value is None:
        raise ValueError(
            "Error initializing torch.distributed using holdfast:// rendezvous: "
            f"environment variable {variable} expected, but not set"
        )
    return int(value)


register_rendezvous_handler("holdfast", _rendezvous)  # type: ignore[no-untyped-call]
