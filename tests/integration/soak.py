# SPDX-License-Identifier: Apache-2.0
"""Blows to a training: kills of everything that a job consists of, one after the other, at random.

Two nodes save to memory at every step, with a copy on the other node, and to storage at every
tenth. After each blow the state that was loaded must be, bit for bit, one that was saved; of one
step on all ranks; not older than what was committed when the blow fell, nor than what the memory
that is left still held.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tests.integration.jobs import Command, Event, Jobs, lose_memory_of

KILLS = int(os.environ.get("HOLDFAST_SOAK_KILLS", "3"))
"""In each training; `make soak` asks for hundreds."""
SEED = int(os.environ.get("HOLDFAST_SOAK_SEED", "0"))
"""Of what is killed when."""

FIRST = ("worker", "host", "agent")
"""However few there are, these are among them."""
CHANCES = {
    "worker": 40,
    "two workers": 20,
    "master": 10,
    "master and worker": 10,
    "agent": 6,  # Its workers end with it; its memory stays for the next agent.
    "host": 6,  # An agent, its workers and its memory.
    "both agents": 2,
    "both hosts": 2,
    "master and host": 2,
    "everything": 2,  # The memory stays; the same command goes on with the job.
}
"""In percent. A new node imports torch for every worker, which takes as long as ten warm restarts;
and nodes that hardly live for a minute are launched after longer and longer pauses."""
IN_RECOVERY = 0.2
"""How often a blow falls while the world recovers from the one before."""


@dataclass(frozen=True, slots=True)
class Blow:
    """What was killed, and what may be lost by it."""

    kind: str
    at: float
    round: int
    floor: int
    """The oldest step that may be loaded after it."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a world went on after the blows that fell since the last recovery."""

    kind: str
    """Of the last of them."""
    took_s: float
    """From the last blow to the first step of any rank."""
    repeated: int
    """Steps that were done again."""


class Soak:
    """One training, and what is known of it.

    Its ranks note "loaded" and "saves" with a digest of their state, "step" after a save, and wait
    after the step $HOLD for `Jobs.go`. What it has on storage is in the folder "saves".
    """

    def __init__(
        self,
        jobs: Jobs,
        start: Callable[[], Command],
        *,
        world: int,
        unsealed: int,
    ) -> None:
        """`unsealed`: how many steps a rank may have done that are not whole in memory yet."""
        self.jobs = jobs
        self.job = start()
        self._start = start
        self._dice = random.Random(SEED)
        self._size = world
        self._unsealed = unsealed
        jobs.go_when_warm(self.job, nodes=2)
        self._world = jobs.wait_world(world)
        self.blows: list[Blow] = []
        self.recoveries: list[Recovery] = []

    def strike_all(self) -> None:
        """All blows of the seed; returns when the world trains again after the last."""
        kinds = [*FIRST, *self._dice.choices([*CHANCES], [*CHANCES.values()], k=KILLS)]
        for number, kind in enumerate(kinds[:KILLS]):
            # A host that is lost before there are new copies takes the only ones with it.
            may_hurry = number >= len(FIRST) and self.blows[-1].kind != "master"
            may_hurry = may_hurry and "host" not in kind
            if may_hurry and self._dice.random() < IN_RECOVERY:
                self._blow_in_recovery(kind)
            else:
                self._blow(kind)
        self._recovered()

    def _blow(self, kind: str) -> None:
        """Kill something of the present world after a few steps."""
        if self.blows:
            self._recovered()
        begun = max(event.step for event in self.jobs.steps() if self._is_of_world(event))
        step = begun + self._dice.randint(*((4, 8) if "host" in kind else (1, 5)))
        self.jobs.wait_for("step", lambda event: event.step >= step and self._is_of_world(event))
        self._strike(kind)

    def _blow_in_recovery(self, kind: str) -> None:
        """Kill something of a world that is just being restored."""
        past = self.blows[-1].round
        loaded = self.jobs.wait_for("loaded", lambda event: event.round > past)
        newest = max(event.round for event in loaded)
        self._world = [event for event in loaded if event.round == newest]
        self._strike(kind)

    def _recovered(self) -> None:
        """Wait until the world trains again, and check what it went on with."""
        blow = self.blows[-1]
        if blow.kind == "master":
            self.jobs.wait_for("step", lambda event: event.t > blow.at, count=self._size)
            assert max(event.round for event in self.jobs.events()) == blow.round
            return
        self._world = self.jobs.wait_world(self._size, after=self._world)
        self._check_loads()
        before = [event.step for event in self.jobs.steps() if event.round == blow.round]
        first = next(event for event in self.jobs.steps() if self._is_of_world(event))
        repeated = max(before, default=first.step - 1) - first.step + 1
        self.recoveries.append(Recovery(blow.kind, first.t - blow.at, repeated))
        print(f"soak: blow {len(self.blows)}: {self.recoveries[-1]}")

    def _is_of_world(self, event: Event) -> bool:
        return event.round == self._world[0].round

    def _strike(self, kind: str) -> None:
        floor = self._floor(kind)
        newest = max(event.round for event in self.jobs.events())
        self.blows.append(Blow(kind, time.monotonic(), newest, floor))
        pids = self._dice.sample([event.pid for event in self._world], len(self._world))
        agents = sorted({event.agent for event in self._world})
        self._dice.shuffle(agents)
        if kind.startswith("master"):
            for master in self.jobs.running("master"):
                master.kill()
        match kind.removeprefix("master and "):
            case "worker":
                os.kill(pids[0], signal.SIGKILL)
            case "two workers":
                for pid in pids[:2]:
                    os.kill(pid, signal.SIGKILL)
            case "agent":
                os.kill(agents[0], signal.SIGKILL)
            case "both agents":
                for agent in agents:
                    os.kill(agent, signal.SIGKILL)
            case "host":
                lose_memory_of(agents[0])
            case "both hosts":
                for agent in agents:
                    lose_memory_of(agent)
            case "everything":
                self._lose_the_machine()
                self.job = self._start()

    def _lose_the_machine(self) -> None:
        """Everything at once: nobody sees anybody else die."""
        # Again for those that were being started while the others were stopped.
        for _ in range(2):
            for process in self.jobs.living():
                with suppress(psutil.Error):
                    process.suspend()
        self.jobs.kill_all()
        self.job.wait()

    def _floor(self, kind: str) -> int:
        """The oldest step that may be loaded if this is killed now."""
        kept = 0
        last = self.blows[-1] if self.blows else None
        loads = [event for event in self.jobs.events("loaded") if self._is_of_world(event)]
        if len(loads) == self._size:
            steps = [event for event in self.jobs.steps() if self._is_of_world(event)]
            done = min(
                max((event.step for event in steps if event.rank == rank), default=loads[0].step)
                for rank in range(self._size)
            )
            done = max(done - self._unsealed, loads[0].step)
            if "host" not in kind:
                kept = done
            elif "both" not in kind and done >= loads[0].step + 3:
                # Of three slots two may wait to be copied to the other node.
                kept = done - 2
        elif "host" not in kind and last is not None:
            kept = last.floor
        return max(kept, self._committed())

    def _committed(self) -> int:
        manifests = (self.jobs.folder / "saves").glob("step-*/manifest.json")
        return max((int(path.parent.name.removeprefix("step-")) for path in manifests), default=0)

    def _check_loads(self) -> None:
        """Of every round since the first blow."""
        saved = {(event.step, event.rank, event.state) for event in self.jobs.events("saves")}
        by_round: dict[int, set[int]] = {}
        for event in self.jobs.events("loaded"):
            if event.round > self.blows[0].round:
                by_round.setdefault(event.round, set()).add(event.step)
                was_saved = (event.step, event.rank, event.state) in saved
                assert was_saved, f"{event} is no state that was saved\n{self.told()}"
        for round_, steps in by_round.items():
            blow = [blow for blow in self.blows if blow.round < round_][-1]
            assert len(steps) == 1, f"{blow}: round {round_} has steps {steps}\n{self.told()}"
            assert min(steps) >= blow.floor, f"{blow}: step {steps} is too old\n{self.told()}"

    def told(self) -> str:
        """What was killed so far, and how it went on."""
        lines = [f"soak: {len(self.blows)} kills"]
        for kind, kills in Counter(blow.kind for blow in self.blows).items():
            of_kind = [one for one in self.recoveries if one.kind == kind]
            took = sorted(one.took_s for one in of_kind) or [0.0]
            times = f"{took[0]:.2f} / {took[len(took) // 2]:.2f} / {took[-1]:.2f} s"
            repeated = max((one.repeated for one in of_kind), default=0)
            lines.append(f"soak: {kind}: {kills}, {times}, at most {repeated} steps again")
        return "\n".join(lines)
