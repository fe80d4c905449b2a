# SPDX-License-Identifier: Apache-2.0
"""Amounts of cpu, memory and GPUs: what nodes ask for, and the most that a job may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one or more nodes ask for; 0 where nothing was said."""

    cpu_milli: int = 0
    memory_mib: int = 0
    gpus: int = 0

    def __add__(self, other: "Resources") -> "Resources":
        return Resources(
            cpu_milli=self.cpu_milli + other.cpu_milli,
            memory_mib=self.memory_mib + other.memory_mib,
            gpus=self.gpus + other.gpus,
        )

    def less(self, other: "Resources") -> "Resources":
        """What is left without the other."""
        return self + other.times(-1)

    def times(self, count: int) -> "Resources":
        """What `count` such nodes ask for."""
        return Resources(
            cpu_milli=self.cpu_milli * count,
            memory_mib=self.memory_mib * count,
            gpus=self.gpus * count,
        )


NOTHING = Resources()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that all nodes of a job together may ask for; None: as much as they like."""

    cpu_milli: int | None = None
    memory_mib: int | None = None
    gpus: int | None = None

    def refusal(self, asked: Resources, before: Resources = NOTHING) -> str:
        """Why nodes that ask for `before` may not ask for `asked`; empty if they may.

        To ask for no more than before is always allowed, wherever the limit is.
        """
        for most, now, then, words in (
            (self.cpu_milli, asked.cpu_milli, before.cpu_milli, cores),
            (self.memory_mib, asked.memory_mib, before.memory_mib, memory),
            (self.gpus, asked.gpus, before.gpus, gpus),
        ):
            if most is not None and now > most and now > then:
                return f"all nodes together would ask for {words(now)}, more than {words(most)}"
        return ""


NO_LIMITS = Limits()


def cores(cpu_milli: int) -> str:
    """In words: "1.5 cores"."""
    return f"{cpu_milli / 1000:g} cores"


def memory(memory_mib: int) -> str:
    """In words: "512 MiB of memory"."""
    return f"{memory_mib} MiB of memory"


def gpus(count: int) -> str:
    """In words: "8 GPUs"."""
    return f"{count} GPUs"
