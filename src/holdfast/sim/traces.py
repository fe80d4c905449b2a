# SPDX-License-Identifier: Apache-2.0
"""Faults that really happened: the replay of a recorded trace for any number of machines.

The format is that of the public StepFun trace (InfiniteHBD, SIGCOMM'25): a JSON list of events with
the server, the time in days, `fault_start` or `fault_end`, and the class of the fault. The trace
says how long a server was away, not how the fault showed: only that is drawn from the seed.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.model.errors import UsageError
from holdfast.sim.failures import CORRUPT, CRASH, DAY_S, SLOW, SOFTWARE, FailureModel, Fault, pick

TRACE_SERVERS = 400
"""Servers of the public trace. The file names only servers that failed, so it lacks the number."""

_OUT_OF_SERVICE = ("stress test", "change", "test", "training task troubleshooting")
_CAUSES = {
    "gpu": "gpu_compute",
    "nic": "network",
    "parameter plane cable": "network",
    "unknown error": "unknown",
    "file system": SOFTWARE,
    "operating system": SOFTWARE,
    "software tool": SOFTWARE,
    "firmware": SOFTWARE,
    "system crash": SOFTWARE,
    "other failures": SOFTWARE,
}
"""By class, in small letters; any other class is a part of the host."""


class _FaultType(msgspec.Struct):
    klass: str = msgspec.field(name="Class")


class _Entry(msgspec.Struct):
    node_id: str
    event_time: float
    event_type: str
    fault_type: _FaultType


@dataclass(frozen=True, slots=True)
class Outage:
    """One server of the trace being away."""

    server: int
    from_s: float
    to_s: float
    cause: str


def read(path: Path, servers: int) -> list[Outage]:
    """The outages of a trace file, in order of time, without those of tests and changes."""
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[_Entry])
    except (OSError, msgspec.MsgspecError) as exc:
        raise UsageError(f"the trace {path} cannot be read: {exc}") from exc
    numbers = {name: i for i, name in enumerate(sorted({entry.node_id for entry in entries}))}
    if len(numbers) > servers:
        raise UsageError(f"the trace {path} names {len(numbers)} servers, not at most {servers}")
    begun: dict[str, list[_Entry]] = {}
    ended: dict[str, list[float]] = {}
    for entry in sorted(entries, key=lambda entry: entry.event_time):
        if entry.event_type == "fault_start":
            begun.setdefault(entry.node_id, []).append(entry)
        else:
            ended.setdefault(entry.node_id, []).append(entry.event_time)
    outages = []
    for name, starts in begun.items():
        ends = ended.get(name, [])
        if len(ends) != len(starts):
            raise UsageError(f"server {name} of the trace {path} has a fault without an end")
        for start, end in zip(starts, ends, strict=True):
            kind = start.fault_type.klass.lower()
            if not kind.startswith(_OUT_OF_SERVICE):
                cause = _CAUSES.get(kind, "host_hw")
                from_s, to_s = start.event_time * DAY_S, end * DAY_S
                outages.append(Outage(numbers[name], from_s, to_s, cause))
    if not outages:
        raise UsageError(f"the trace {path} has no faults of servers in service")
    return sorted(outages, key=lambda outage: (outage.from_s, outage.server))


def replay(
    outages: list[Outage],
    model: FailureModel,
    machines: int,
    span_s: float,
    seed: int,
    servers: int = TRACE_SERVERS,
) -> list[Fault]:
    """The trace for `machines` machines: unchanged if the trace has as many, else in copies.

    Each further block of machines gets the whole trace, with its own start time and its own order
    of servers: faults that came together still come together. A span longer than the trace repeats
    the trace from its start.
    """
    chance = random.Random(f"holdfast trace {seed}")
    lengths = sorted(outage.to_s - outage.from_s for outage in outages)
    transient_below_s = lengths[int(len(lengths) * model.transient_share)]
    length_s = max(outage.to_s for outage in outages)
    faults: list[Fault] = []
    away: dict[int, float] = {}
    for block in range(0, machines, servers):
        order = list(range(servers))
        shift_s = 0.0
        if machines != servers:
            chance.shuffle(order)
            shift_s = chance.random() * length_s
        for lap in range(-1, int(span_s // length_s) + 1):
            for outage in outages:
                machine = block + order[outage.server]
                at_s = outage.from_s + shift_s + lap * length_s
                if machine < machines and 0 <= at_s < span_s and at_s >= away.get(machine, 0.0):
                    fault = _fault(outage, at_s, machine, model, transient_below_s, chance)
                    away[machine] = at_s + (fault.lasts_s if fault.takes_machine else 0.0)
                    faults.append(fault)
    return sorted(faults, key=lambda fault: (fault.at_s, fault.machine))


def _fault(
    outage: Outage,
    at_s: float,
    machine: int,
    model: FailureModel,
    transient_below_s: float,
    chance: random.Random,
) -> Fault:
    manner = pick(chance, model.manners)
    lasts_s = outage.to_s - outage.from_s
    if manner in (SLOW, CORRUPT):
        manner = CRASH  # A server that was taken out for repair had a worse fault.
    is_transient = outage.cause == SOFTWARE or lasts_s < transient_below_s
    is_silent = outage.cause in model.silent
    return Fault(at_s, machine, outage.cause, manner, is_transient, is_silent, lasts_s)
