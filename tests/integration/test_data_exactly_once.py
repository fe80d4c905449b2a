# SPDX-License-Identifier: Apache-2.0
"""Whatever dies and whenever: the model that is left has seen every sample of every epoch once."""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from holdfast.client.data import DataShards
from tests.integration.jobs import SCRIPTS, Command, Event, Jobs, MasterCommand

READING = str(SCRIPTS / "reading.py")
EPOCHS = 2
SIZE = int(os.environ.get("HOLDFAST_SOAK_SAMPLES", "200000")) // EPOCHS
DEATHS = ("worker", "worker", "node", "master", "worker while the master is away")
KILLS = int(os.environ.get("HOLDFAST_SOAK_KILLS", len(DEATHS)))
"""The first deaths are those above, the further ones are drawn from them."""


@dataclass
class Life:
    """One round: where it began, and what each of its ranks read at every step."""

    loaded: int = 0
    saved_in: int = 0
    """The round that saved what this one began with; 0: it began with nothing."""
    read: dict[int, Counter[tuple[int, int]]] = field(default_factory=dict)
    order: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)
    """The samples of every step by epoch and place in the order of the epoch."""
    counted: list[list[int]] = field(default_factory=list)
    """By each rank that ended: how many samples its model counted never, once, twice..."""


def lives(jobs: Jobs) -> dict[int, Life]:
    found: dict[int, Life] = {}
    for text in (jobs.folder / "history").read_text().splitlines():
        line = json.loads(text)
        life = found.setdefault(line["round"], Life())
        if "loaded" in line:
            life.loaded, life.saved_in = line["loaded"], line["saved_in"]
        elif "counted" in line:
            life.counted.append(line["counted"])
        else:
            read = life.read.setdefault(line["step"], Counter())
            read.update((line["epoch"], sample) for sample in line["samples"])
            places = [at for begin, end in line.get("spans", ()) for at in range(begin, end)]
            life.order.setdefault(line["step"], {}).update(
                ((line["epoch"], at), sample)
                for at, sample in zip(places, line["samples"], strict=bool(places))
            )
    return found


def seen_by_the_model(found: dict[int, Life]) -> Counter[tuple[int, int]]:
    """Every sample on the way to the last step."""
    seen: Counter[tuple[int, int]] = Counter()
    for life, step in lineage(found):
        seen.update(life.read[step])
    return seen


def order_of_the_model(found: dict[int, Life]) -> dict[tuple[int, int], int]:
    """The same samples by epoch and place in its order."""
    order: dict[tuple[int, int], int] = {}
    for life, step in lineage(found):
        order.update(life.order[step])
    return order


def lineage(found: dict[int, Life]) -> Iterator[tuple[Life, int]]:
    """The steps that led to the last one, back through the lives that made them."""
    number = max(found)
    end = max(found[number].read, default=found[number].loaded)
    while number:
        life = found[number]
        for step in range(life.loaded + 1, end + 1):
            yield life, step
        number, end = life.saved_in, life.loaded


class Training:
    """Two nodes of two workers each, a master, and what happens to them."""

    def __init__(self, jobs: Jobs, seed: int, size: int, **env: str) -> None:
        self.jobs = jobs
        self.random = random.Random(seed)
        self.size = size
        self.env = {"SIZE": str(size), "EPOCHS": str(EPOCHS), "REPLICAS": "1", **env}
        self.master: MasterCommand = jobs.master()
        self.nodes: dict[str, Command] = {}
        self.world: list[Event] = []
        #: Rounds in which the master was away for a while.
        self.without_master: set[int] = set()
        for name in "ab":
            self.start_node(name)

    def start_node(self, name: str) -> None:
        memory = self.jobs.folder / f"memory-{name}"
        memory.mkdir()
        options = ("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1000")
        env = {**self.env, "HOLDFAST_MEMORY_DIR": str(memory)}
        self.nodes[name] = self.jobs.node(self.master, *options, READING, name=name, **env)

    def go_on(self) -> None:
        """Until a new round has made some steps."""
        steps = self.random.randint(3, 30)
        self.world = self.jobs.wait_world(4, after=self.world, steps=steps)

    def suffer(self, what: str) -> None:
        """Something dies."""
        match what:
            case "worker":
                os.kill(self.random.choice(self.world).pid, signal.SIGKILL)
            case "node":
                name = self.random.choice(sorted(self.nodes))
                self.nodes.pop(name).kill()
                self.start_node(f"{name}x")
            case "master":
                self.master.kill()
                self.restart_master()
                # The round goes on. A node that is lost soon after takes the steps with it that
                # were made without a master: nobody has vouched for their copies.
                self.without_master.add(self.world[0].round)
                return
            case "worker while the master is away":
                self.master.kill()
                os.kill(self.random.choice(self.world).pid, signal.SIGKILL)
                self.restart_master()
        self.go_on()

    def restart_master(self) -> None:
        self.master = self.jobs.master(listen=self.master.address)

    def expect_every_sample_once(self) -> dict[int, Life]:
        for node in self.nodes.values():
            node.succeeds(120)
        found = lives(self.jobs)
        seen = seen_by_the_model(found)
        samples = {(epoch, sample) for epoch in range(EPOCHS) for sample in range(self.size)}
        assert {one for one, times in seen.items() if times > 1} == set(), "seen twice"
        assert samples - seen.keys() == set(), "never seen"
        assert seen.keys() - samples == set()
        counts = found[max(found)].counted
        assert counts == [[0, EPOCHS * self.size]] * 4, "the models' own counts say otherwise"
        return found

    def expect_the_order_of_an_undisturbed_run(self, found: dict[int, Life]) -> None:
        """That of one process that reads the same dataset alone, without any failure."""
        alone = DataShards(
            "train", size=self.size, shard_size=1000, epochs=EPOCHS, shuffle="samples"
        )
        expected = {
            (epoch, at): sample for epoch in alone.epochs() for at, sample in enumerate(alone)
        }
        assert order_of_the_model(found) == expected


@pytest.mark.timeout(400 + 20 * KILLS)
@pytest.mark.parametrize("seed", range(int(os.environ.get("HOLDFAST_SOAK_SEEDS", "1"))))
def test_every_sample_once_whatever_dies(jobs: Jobs, seed: int) -> None:
    """Prior art: after a restore some samples are trained twice and others never.

    Workers, nodes and the master are killed after random steps of each round, two epochs of
    100,000 samples long. The seed decides what dies when. `HOLDFAST_SOAK_SAMPLES=1000000
    HOLDFAST_SOAK_KILLS=40` makes more of both.
    """
    training = Training(jobs, seed, size=SIZE)
    training.go_on()
    deaths = [*DEATHS, *training.random.choices(DEATHS, k=KILLS)][:KILLS]
    training.random.shuffle(deaths)
    for what in deaths:
        training.suffer(what)
    found = training.expect_every_sample_once()
    training.expect_the_order_of_an_undisturbed_run(found)
    assert len(found) > KILLS - deaths.count("master")
    # From memory: hardly anything was done twice.
    reached = 0
    for _, life in sorted(found.items()):
        assert life.loaded >= reached - 3 or life.saved_in in training.without_master
        reached = max(life.read, default=life.loaded)
    jobs.expect_nothing_left()
