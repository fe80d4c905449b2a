# SPDX-License-Identifier: Apache-2.0
"""Leader election: of several operators one acts, and the others wait until its lease expires.

The clocks of two machines are never compared. A candidate that waits counts from the moment when it
last saw the lease change. The leader counts from the moment when it asked for the renewal, and
stops well before another candidate takes over.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.model.errors import HoldfastError
from holdfast.platforms.kubernetes.answers import Conflict, NotFound
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.kinds import LEASES
from holdfast.platforms.kubernetes.times import micro_stamp
from holdfast.platforms.kubernetes.watching import Listed, follow
from holdfast.runtime.observe import Say, wall_clock

LEASE = "holdfast-operator"
LEASE_S = 15.0
STOP_AT = 2 / 3
"""The part of a lease after which a leader that could not renew it stops."""
RENEW_AT = 1 / 4
PAUSE_AT = 1 / 15
"""The pause between two tries while the server does not answer, as a part of a lease."""
FAREWELL_S = 5.0


class _Camel(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    pass


class LeaseSpec(_Camel, frozen=True):
    """Which candidate leads, and for how long after the last renewal."""

    holder_identity: str = ""
    lease_duration_seconds: int = int(LEASE_S)
    lease_transitions: int = 0
    acquire_time: str | None = None
    renew_time: str | None = None


class LeaseMeta(_Camel, frozen=True):
    resource_version: str = ""


class Lease(_Camel, frozen=True):
    metadata: LeaseMeta = LeaseMeta()
    spec: LeaseSpec = LeaseSpec()


@dataclass(frozen=True, slots=True)
class Take:
    """The lease is free."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Another candidate leads, at least until then."""

    until: float


def decide(lease: Lease | None, me: str, *, seen_at: float, now: float) -> Take | Wait:
    """Whether `me` may lead, if it last saw the lease change at `seen_at`."""
    if lease is None or lease.spec.holder_identity in ("", me):
        return Take()
    ends_at = seen_at + lease.spec.lease_duration_seconds
    return Take() if now >= ends_at else Wait(ends_at)


class Leadership:
    """One candidate."""

    def __init__(self, api: Api, namespace: str, me: str, *, say: Say, lease_s: float = LEASE_S):
        self._api, self._namespace, self._me = api, namespace, me
        self._say, self._lease_s = say, lease_s
        self._lease: Lease | None = None
        self._seen_at = 0.0
        self._changed = asyncio.Event()
        #: Until when this candidate may act, by the loop's clock.
        self._leads_until = 0.0
        self.leads = False
        """Whether this candidate acts now."""

    @property
    def knows_leader(self) -> bool:
        """Whether another candidate leads, as far as this one can see."""
        now = asyncio.get_running_loop().time()
        return isinstance(decide(self._lease, self._me, seen_at=self._seen_at, now=now), Wait)

    async def hold(self, act: Callable[[], Awaitable[None]]) -> None:
        """Run `act` whenever, and only while, this candidate leads. Ends only by cancellation, or
        by an error of `act`."""
        while True:
            async with self._watching():
                await self._acquire()
            self._say(f"{self._me} leads")
            self.leads = True
            try:
                await self._lead(act)
            finally:
                self.leads = False
                await self._release()
            self._say(f"{self._me} leads no more")

    # ---- becoming the leader ---------------------------------------------------------------------

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        self._changed.clear()
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self) -> None:
        fields = f"metadata.name={LEASE}"
        async for seen in follow(
            self._api, LEASES, self._namespace, fields=fields, type=Lease, say=self._say
        ):
            if not isinstance(seen, Listed):
                self._see(None if seen.gone else seen.obj)
            self._changed.set()

    def _see(self, lease: Lease | None) -> None:
        if lease != self._lease:
            self._lease, self._seen_at = lease, asyncio.get_running_loop().time()

    async def _acquire(self) -> None:
        """Wait until the lease is free, and take it."""
        loop = asyncio.get_running_loop()
        wait_s: float | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            self._changed.clear()
            match decide(self._lease, self._me, seen_at=self._seen_at, now=loop.time()):
                case Wait(until):
                    wait_s = until - loop.time()
                case Take():
                    if await self._take():
                        return
                    wait_s = self._lease_s * RENEW_AT

    async def _take(self) -> bool:
        """Write the lease for this candidate; whether that worked."""
        asked_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._lease_s * STOP_AT):
                lease = await self._write(self._me)
        except (Conflict, NotFound):
            return False  # Another candidate was faster; the watch reports it.
        except (HoldfastError, TimeoutError) as exc:
            self._say(f"the lease {LEASE} could not be written: {exc or 'no answer'}")
            return False
        self._see(lease)
        self._leads_until = asked_at + self._lease_s * STOP_AT
        return True

    # ---- staying it ------------------------------------------------------------------------------

    async def _lead(self, act: Callable[[], Awaitable[None]]) -> None:
        """Run `act` until the lease is lost; what is under way then is cancelled."""
        acting = asyncio.ensure_future(act())
        renewing = asyncio.create_task(self._renew())
        try:
            done, _ = await asyncio.wait({acting, renewing}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (acting, renewing):
                task.cancel()
            await asyncio.gather(acting, renewing, return_exceptions=True)

    async def _renew(self) -> None:
        """Renew the lease; ends when another candidate has it, or when no renewal came in time."""
        while True:
            await asyncio.sleep(self._lease_s * RENEW_AT)
            try:
                async with asyncio.timeout_at(self._leads_until):
                    while not await self._take():
                        await self._look()
                        if self._holder() not in ("", self._me):
                            return
            except TimeoutError:
                return

    async def _look(self) -> None:
        """Read the lease after a failed write, which may have worked without an answer."""
        try:
            self._see(await self._api.get(LEASES, LEASE, self._namespace, type=Lease))
        except NotFound:
            self._see(None)
        except HoldfastError:
            await asyncio.sleep(self._lease_s * PAUSE_AT)

    async def _release(self) -> None:
        """Free the lease for another candidate at once, if this one still has it."""
        if asyncio.get_running_loop().time() >= self._leads_until or self._holder() != self._me:
            return
        with suppress(HoldfastError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                self._see(await self._write(""))

    def _holder(self) -> str:
        return "" if self._lease is None else self._lease.spec.holder_identity

    async def _write(self, holder: str) -> Lease:
        """Write the lease; Conflict if it is not as this candidate saw it last."""
        now = micro_stamp(wall_clock())
        spec: dict[str, Any] = {
            "holderIdentity": holder,
            "leaseDurationSeconds": math.ceil(self._lease_s),
            "renewTime": now,
        }
        body: dict[str, Any] = {
            "apiVersion": LEASES.api_version,
            "kind": "Lease",
            "metadata": {"name": LEASE, "namespace": self._namespace},
            "spec": spec,
        }
        before = self._lease
        if before is None:
            body["spec"] = {**spec, "acquireTime": now, "leaseTransitions": 0}
            return _read(await self._api.create(LEASES, body, self._namespace))
        is_new = before.spec.holder_identity != holder
        spec["acquireTime"] = now if is_new else before.spec.acquire_time
        spec["leaseTransitions"] = before.spec.lease_transitions + is_new
        body["metadata"]["resourceVersion"] = before.metadata.resource_version
        return _read(await self._api.replace(LEASES, LEASE, body, self._namespace))


def _read(obj: dict[str, Any]) -> Lease:
    return msgspec.convert(obj, Lease)
