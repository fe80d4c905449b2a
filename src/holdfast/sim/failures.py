# SPDX-License-Identifier: Apache-2.0
"""How machines fail: a seeded stream of faults, from published rates or from a recorded trace.

A memoryless model is wrong in five ways that matter for spares and restarts. Some machines fail
again and again (frailty), faults come in bursts within a rack, a machine back from repair fails
again soon, a repair takes minutes or months, and there are outbreaks: a thing that machines share
goes bad, more of them fail for weeks, and some wait for the same part and come back together. All
numbers and their sources are in failures.yaml. The faults of a seed do not depend on what the job
does about them, so that policies can be compared on the same faults.
"""

import math
import random
from bisect import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from importlib.resources import files
from itertools import accumulate
from statistics import NormalDist
from typing import Any, TypeVar

import yaml

from holdfast.model.errors import UsageError

DAY_S = 86_400.0
YEAR_S = 365 * DAY_S
HOUR_S = 3_600.0

HISTORY_S = 90 * DAY_S
"""The length of a cluster's history before the span: most repairs are shorter."""

CRASH, HANG, SLOW, CORRUPT = "crash", "hang", "slow", "corrupt"
SOFTWARE = "software"
"""The one cause that takes no machine away."""

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong on one machine."""

    at_s: float
    machine: int
    cause: str
    manner: str
    is_transient: bool
    """True when a plain restart on the same machine is all it takes."""
    is_silent: bool
    """True when the machine vanishes without closing its connections."""
    lasts_s: float
    """Until the machine is repaired; for a slow machine, how long it is slow."""
    factor: float = 1.0
    """How much longer a step takes while the machine is slow."""

    @property
    def takes_machine(self) -> bool:
        """Whether the machine is away until it is repaired."""
        return self.manner != SLOW and not self.is_transient


@dataclass(frozen=True, slots=True)
class FailureModel:
    """The numbers of failures.yaml for one preset; rates per second, times in seconds."""

    per_machine_s: float
    outbreaks_per_s: float
    outbreak_s: float
    outbreak_times: float
    """By how much an outbreak multiplies the rate of the whole cluster."""
    waiting_share: float
    """The share of an outbreak's faults whose machines come back together."""
    back_after_s: float
    """When they come back, from the beginning of the outbreak."""
    causes: Mapping[str, float]
    silent: frozenset[str]
    frailty_shape: float
    burst_share: float
    burst_sizes: Mapping[int, float]
    burst_window_s: float
    same_repair: float
    rack_machines: int
    refail_share: float
    refail_within_s: float
    repair_mu: float
    repair_sigma: float
    repair_cap_s: float
    manners: Mapping[str, float]
    transient_share: float
    slow_factor: tuple[float, float]
    slow_s: tuple[float, float]

    @property
    def transient_below_s(self) -> float:
        """Repairs shorter than this stand for faults that a plain restart mends as well."""
        quantile = NormalDist(self.repair_mu, self.repair_sigma).inv_cdf(self.transient_share)
        return math.exp(quantile) * HOUR_S

    @property
    def outbreaks_per_calm(self) -> float:
        """Faults that outbreaks add, for each fault without an outbreak."""
        return self.outbreaks_per_s * self.outbreak_s * (self.outbreak_times - 1)

    @property
    def away_s(self) -> float:
        """How long a fault takes its machine away on average."""
        mu, sigma, normal = self.repair_mu, self.repair_sigma, NormalDist()
        cap = (math.log(self.repair_cap_s / HOUR_S) - mu) / sigma
        hours = math.exp(mu + sigma**2 / 2) * normal.cdf(cap - sigma)
        mean_s = hours * HOUR_S + self.repair_cap_s * (1 - normal.cdf(cap))
        waiting = self.waiting_share * self.outbreaks_per_calm / (1 + self.outbreaks_per_calm)
        mean_s += waiting * (self.back_after_s - self.outbreak_s / 2 - mean_s)
        software = self.causes.get(SOFTWARE, 0.0) / sum(self.causes.values())
        return mean_s * (1 - software) * (1 - self.manners[SLOW] / sum(self.manners.values()))

    @property
    def firsts_per_machine_s(self) -> float:
        """The rate of faults that no other fault caused, over all machines.

        Published rates are those of machines in service. Frail machines are in repair more often
        than others (to first order, a share of rate times repair over the shape), so machines in
        service are sturdier than all machines are.
        """
        sturdier = 1 - self.per_machine_s * self.away_s / self.frailty_shape
        return self.per_machine_s / self.faults_per_first / sturdier

    @property
    def burst_probability(self) -> float:
        """The probability that a first fault, which no other fault caused, begins a burst."""
        size = sum(size * weight for size, weight in self.burst_sizes.items())
        size /= sum(self.burst_sizes.values())
        share = self.burst_share
        return share / (size - share * (size - 1))

    @property
    def faults_per_first(self) -> float:
        """How many faults one first fault causes on average, itself included."""
        total = sum(self.burst_sizes.values())
        more = sum((size - 1) * weight for size, weight in self.burst_sizes.items()) / total
        return (1 + self.burst_probability * more) / (1 - self.refail_share)


def numbers() -> dict[str, Any]:
    """failures.yaml: each number is a table of its value, its source and its reason."""
    text = files("holdfast.sim").joinpath("failures.yaml").read_text("utf-8")
    table: dict[str, Any] = yaml.safe_load(text)
    return table


def _values(node: Any) -> Any:
    """The numbers without their sources and reasons."""
    if not isinstance(node, dict):
        return node
    if "value" in node:
        return node["value"]
    return {name: _values(child) for name, child in node.items()}


def presets() -> tuple[str, ...]:
    """The names of the failure models that come with Holdfast."""
    return tuple(numbers()["presets"])


def preset(name: str) -> FailureModel:
    """One of the failure models that come with Holdfast."""
    table = _values(numbers())
    own = table["presets"].get(name)
    if own is None:
        known = ", ".join(table["presets"])
        raise UsageError(f"there are no failures {name!r}; known are {known}, or a trace file")
    bursts, repair, outbreaks = table["bursts"], table["repair"], own.get("outbreaks", {})
    return FailureModel(
        per_machine_s=own["per_1000_node_days"] / 1000 / DAY_S,
        outbreaks_per_s=outbreaks.get("per_year", 0) / YEAR_S,
        outbreak_s=outbreaks.get("days", 0) * DAY_S,
        outbreak_times=outbreaks.get("times_the_rate", 1),
        waiting_share=outbreaks.get("waiting_share", 0.0),
        back_after_s=outbreaks.get("back_after_days", 0) * DAY_S,
        causes=own.get("causes", table["causes"]),
        silent=frozenset(table["silent"]["causes"]),
        frailty_shape=table["frailty"]["shape"],
        burst_share=bursts["share_of_faults"],
        burst_sizes=bursts["sizes"],
        burst_window_s=bursts["window_s"],
        same_repair=bursts["same_repair"],
        rack_machines=bursts["rack_machines"],
        refail_share=table["refailure"]["probability"],
        refail_within_s=table["refailure"]["within_days"] * DAY_S,
        repair_mu=repair["mu_ln"],
        repair_sigma=repair["sigma_ln"],
        repair_cap_s=repair["cap_hours"] * HOUR_S,
        manners=table["manner"],
        transient_share=table["transient"]["share"],
        slow_factor=tuple(table["slow"]["factor"]),
        slow_s=tuple(table["slow"]["episode_s"]),
    )


def draw(model: FailureModel, machines: int, span_s: float, seed: int) -> list[Fault]:
    """Every fault of `machines` machines in `span_s` seconds, in order of time.

    The cluster is not new: it has a history, and some machines are in repair when the span begins.
    These are faults at time 0, with what is left of the repair.
    """
    found: list[Fault] = []
    for fault in _Drawing(model, machines, HISTORY_S + span_s, seed).faults():
        at_s = fault.at_s - HISTORY_S
        if at_s > 0:
            found.append(replace(fault, at_s=at_s))
        elif fault.takes_machine and at_s + fault.lasts_s > 0:
            found.append(replace(fault, at_s=0.0, lasts_s=at_s + fault.lasts_s))
    return found


class _Drawing:
    """One history of faults while it is being drawn.

    First faults, which no other fault caused, come at the rate of the whole cluster and hit
    machines by their frailty. Each may cause others: its burst, and the re-failure after its
    repair.
    """

    def __init__(self, model: FailureModel, machines: int, span_s: float, seed: int) -> None:
        self._model = model
        self._span_s = span_s
        self._random = random.Random(f"holdfast failures {seed}")
        shape = model.frailty_shape
        frailty = (self._random.gammavariate(shape, 1 / shape) for _ in range(machines))
        self._hit = list(accumulate(frailty))
        self._machines = machines
        self._away_until = [0.0] * machines
        #: Faults to come: (time, number, machine, cause, repair of the fault before it or 0).
        self._ahead: list[tuple[float, int, int, str, float]] = []
        self._number = 0

    def faults(self) -> Iterator[Fault]:
        for at_s, together_s in self._firsts():
            yield from self._due(at_s)
            self._first(at_s, together_s)
        yield from self._due(self._span_s)

    def _firsts(self) -> list[tuple[float, float]]:
        """When the first faults come, and when the waiting machines of their outbreak are back.

        The second time is 0 for a fault that belongs to no outbreak.
        """
        model, span_s = self._model, self._span_s
        rate = model.firsts_per_machine_s * self._machines / (1 + model.outbreaks_per_calm)
        firsts = [(at_s, 0.0) for at_s in self._moments(rate, 0.0, span_s)]
        for begin_s in list(self._moments(model.outbreaks_per_s, -model.outbreak_s, span_s)):
            more, end_s = rate * (model.outbreak_times - 1), min(begin_s + model.outbreak_s, span_s)
            together_s = begin_s + model.back_after_s
            firsts += [(at_s, together_s) for at_s in self._moments(more, max(begin_s, 0.0), end_s)]
        return sorted(firsts)

    def _moments(self, rate: float, from_s: float, to_s: float) -> Iterator[float]:
        """Random moments that come at this rate, independent of each other."""
        at_s = from_s
        while rate > 0 and (at_s := at_s + self._random.expovariate(rate)) < to_s:
            yield at_s

    def _first(self, at_s: float, together_s: float) -> None:
        model, chance = self._model, self._random
        machine = min(bisect(self._hit, chance.random() * self._hit[-1]), self._machines - 1)
        cause = pick(chance, model.causes)
        repair_s = self._repair_s(at_s, together_s)
        self._expect(at_s, machine, cause, repair_s)
        if chance.random() >= model.burst_probability:
            return
        rack = machine - machine % model.rack_machines
        beside = [
            other
            for other in range(rack, min(rack + model.rack_machines, self._machines))
            if other != machine
        ]
        size = min(pick(chance, model.burst_sizes) - 1, len(beside))
        for other in chance.sample(beside, size):
            # The window is that of the whole burst: half of its faults come in the first quarter.
            later_s = model.burst_window_s * chance.random() ** 2
            same = chance.random() < model.same_repair
            own_s = repair_s if same else self._repair_s(at_s + later_s, together_s)
            self._expect(at_s + later_s, other, cause, own_s)

    def _expect(self, at_s: float, machine: int, cause: str, repair_s: float) -> None:
        self._number += 1
        heappush(self._ahead, (at_s, self._number, machine, cause, repair_s))

    def _due(self, until_s: float) -> Iterator[Fault]:
        """The expected faults before this time, and the faults that they cause."""
        while self._ahead and self._ahead[0][0] < until_s:
            at_s, _, machine, cause, repair_s = heappop(self._ahead)
            if at_s < self._away_until[machine]:
                continue  # It is in repair: nothing runs there that could fail.
            fault = self._fault(at_s, machine, cause, repair_s)
            yield fault
            back_s = at_s
            if fault.takes_machine:
                back_s = self._away_until[machine] = at_s + fault.lasts_s
            if self._random.random() < self._model.refail_share:
                again_s = back_s + self._random.random() * self._model.refail_within_s
                self._expect(again_s, machine, cause, self._repair_s(again_s, 0.0))

    def _fault(self, at_s: float, machine: int, cause: str, repair_s: float) -> Fault:
        model, chance = self._model, self._random
        manner = pick(chance, model.manners)
        is_transient = cause == SOFTWARE or repair_s < model.transient_below_s
        is_silent = cause in model.silent
        if manner != SLOW:
            return Fault(at_s, machine, cause, manner, is_transient, is_silent, repair_s)
        factor = chance.uniform(*model.slow_factor)
        low_s, high_s = model.slow_s
        slow_s = low_s * (high_s / low_s) ** chance.random()
        return Fault(at_s, machine, cause, SLOW, True, False, slow_s, factor)

    def _repair_s(self, at_s: float, together_s: float) -> float:
        """The time of a repair. Some machines of an outbreak wait for the same thing."""
        model = self._model
        if together_s and self._random.random() < model.waiting_share:
            return together_s - at_s
        hours = self._random.lognormvariate(model.repair_mu, model.repair_sigma)
        return min(hours * HOUR_S, model.repair_cap_s)


def pick(chance: random.Random, weights: Mapping[Key, float]) -> Key:
    """One of the keys, by its weight."""
    return chance.choices(list(weights), list(weights.values()))[0]
