# SPDX-License-Identifier: Apache-2.0
"""Random histories of reading data, and what must hold in each of them.

The real ledger of shards is driven by virtual workers, agents and a journal: workers crash, nodes
are lost, worlds change their size, the master dies between any two batches of records, streams
break, requests are delayed, reordered and repeated, versions stay incomplete, models roll back.

The model of a version is the list of samples that it was trained on: what the restored version had,
and what each rank had consumed when it saved. In the last version every sample must be there once.
"""

from collections import Counter

from holdfast.core.job import events as ev
from holdfast.core.kernel import Tick
from holdfast.model.checkpoint import NONE, Version
from holdfast.model.ids import Generation, Incarnation, NodeId, NodeRank, Round
from holdfast.model.node import ExitReason
from holdfast.model.world import Member, World
from tests.core.shard_readers import DIRECTORY, LAST_STEP, Readers, Worker, samples


class History(Readers):
    """One seed: everything random comes from it."""

    # ---- running --------------------------------------------------------------------------------

    def run(self) -> None:
        self.new_round()
        trouble = self.rng.choice((0.01, 0.02, 0.04))
        for _ in range(self.rng.randrange(100, 900)):
            self.adversary() if self.rng.random() < trouble else self.go_on()
            if self.is_finished():
                break
        self.heal()
        turns = 0
        while not self.is_finished():
            self.go_on()
            turns += 1
            assert turns < 20_000, f"the job does not end: {self.where()}"
        self.check_end()

    def where(self) -> str:
        view = self.master.shards.view(self.now)
        return f"{self.world} {view} wire={len(self.wire)} answers={len(self.answers)}"

    def go_on(self) -> None:
        self.now += 0.1
        pick = self.rng.random()
        if pick < 0.3 and self.answers:
            self.answer(self.answers.pop(self.rng.randrange(len(self.answers))))
        elif pick < 0.6 and self.wire:
            self.arrive(self.rng.randrange(len(self.wire)))
        elif pick < 0.7:
            self.answers += self.master.write()
        elif pick < 0.72:
            if (at := self.master.shards.deadline()) is not None and at <= self.now:
                self.master.feed(Tick(), self.now)
        else:
            workers = self.world + (self.ghosts if self.rng.random() < 0.2 else [])
            self.act(self.rng.choice(workers))

    def arrive(self, index: int) -> None:
        """One of the requests under way, in any order; marks of one node in theirs."""
        node, event = self.wire[index]
        if isinstance(event, ev.DataMarks) and not self.merges:
            mine = (i for i, (n, e) in enumerate(self.wire) if n == node and type(e) is type(event))
            index = next(mine)
            node, event = self.wire[index]
        self.wire.pop(index)
        if isinstance(event, ev.DataRequested) and self.rng.random() < self.repeats:
            self.wire.append((node, event))  # It arrives twice, the second time any time later.
        self.master.feed(event, self.now)

    # ---- what goes wrong ------------------------------------------------------------------------

    def adversary(self) -> None:
        self.rng.choice(
            (
                self.new_round,
                self.lose_node,
                self.break_stream,
                self.kill_master,
                self.roll_back,
                self.save_again,
            )
        )()

    def heal(self) -> None:
        """From now on nothing goes wrong, and everybody can come to an end."""
        if not self.is_finished() and self.rng.random() < 0.5:
            self.new_round()
        self.ghosts = []

    def save_at_the_end(self) -> None:
        """The world breaks right after a save: its words are under way."""
        if self.rng.random() < 0.5:
            step = max((worker.step for worker in self.world), default=0) + 1
            for worker in self.world:
                is_reading = worker.state == "reading" and worker.may_train
                if worker.node in self.nodes and is_reading and step < LAST_STEP:
                    self.save(worker, step)

    def hear_late(self) -> None:
        """The word of a node may come after the end of its round: each has its own stream."""
        for _ in range(self.rng.randrange(len(self.wire) + 1)):
            late = [i for i, (_, e) in enumerate(self.wire) if isinstance(e, ev.DataMarks)]
            if late:
                self.arrive(self.rng.choice(late))

    def new_round(self) -> None:
        self.save_at_the_end()
        self.faults += self.round > 0
        self.round += 1
        for worker in self.world:
            worker.may_train = False
        self.ghosts = self.world if self.rng.random() < 0.5 else []
        for ghost in self.ghosts:
            ghost.may_train = self.rng.random() < 0.5
        while len(self.nodes) < self.rng.randrange(1, 4):
            self.nodes.append(self.next_node)
            self.marking[self.next_node] = []
            self.next_node += 1
        self.marking = {node: self.marking.get(node, []) for node in self.nodes}
        per_node = self.rng.randrange(1, 3)
        self.world_size = per_node * len(self.nodes)
        self.world = [
            Worker(
                rank,
                self.nodes[rank // per_node],
                self.round,
                f"{self.round}-{rank}",
                pace=self.rng.choice((1.0, 1.0, 0.05)),
            )
            for rank in range(self.world_size)
        ]
        self.master.feed(ev.WorldFormed(self._world(), "", False), self.now)
        self.hear_late()
        self.answers += self.master.write()
        self.saved = {}
        if self.follows:
            for _ in range(self.rng.randrange(20)):
                self.go_on()  # What is still said of the old round counts until the restore.
            self.restore()
        else:
            for worker in self.world:
                worker.may_train = True

    def _world(self) -> World:
        members = tuple(_member(node) for node in self.nodes)
        return World(round=Round(self.round), generation=Generation(self.round), members=members)

    def restore(self) -> None:
        """All ranks agree on a version that has a position, not always the newest, or on none."""
        known = sorted(self.master.versions)
        choice = self.rng.random()
        version = NONE if not known or choice < 0.05 else known[-1]
        if known and choice > 0.6:
            version = self.rng.choice(known)
        positions = self.master.versions.get(version, ())
        self.base = []
        if version != NONE:
            self.restored += 1
            ranks = self.models[version]
            self.base = self.bases[version.lineage] + [s for r in sorted(ranks) for s in ranks[r]]
        self.lineage += 1
        self.lines = Counter(self.base)
        agreed = ev.RestoreAgreed(
            DIRECTORY, Round(self.round), version, self.lineage, False, (), positions
        )
        early = self.rng.random() < 0.3  # Some open the dataset before they load the model.
        for worker in self.world:
            worker.may_train = False
            if early:
                self.act(worker)
        self.master.feed(agreed, self.now)
        self.answers += self.master.write()
        # Newer versions of the old lineage are history: nobody goes back to the future.
        self.master.versions = {v: p for v, p in self.master.versions.items() if v <= version}
        for worker in self.world:
            worker.forget_data()
            # Who restored the very last step goes on from any.
            worker.step, worker.may_train = max(0, version.step) % LAST_STEP, True

    def roll_back(self) -> None:
        """The script loads an older state in the middle of the round."""
        if self.follows:
            self.faults += 1
            self.saved = {}
            self.restore()

    def save_again(self) -> None:
        """The ranks begin a lineage with the models that they have."""
        if self.follows and all(worker.state != "finished" for worker in self.world):
            self.lineage += 1
            again = ev.RestoreAgreed(DIRECTORY, Round(self.round), NONE, self.lineage, True, ())
            self.master.feed(again, self.now)

    def lose_node(self) -> None:
        node = self.rng.choice(self.nodes)
        self.save_at_the_end()
        self.nodes.remove(node)
        self.cut_off(node)
        lost = ev.NodeLost(NodeId(node), NodeRank(0), ExitReason.KILLED, "", True)
        self.master.feed(lost, self.now)
        self.hear_late()
        self.new_round()
        self.ghosts = [ghost for ghost in self.ghosts if ghost.node != node]

    def cut_off(self, node: int) -> None:
        """Of what was under way from a node something may arrive: of its marks the first ones."""
        wire, is_cut = self.wire, False
        self.wire = []
        for sender, event in wire:
            is_mark = isinstance(event, ev.DataMarks)
            if sender == node and (self.rng.random() > 0.3 or (is_mark and is_cut)):
                is_cut = is_cut or is_mark
            else:
                self.wire.append((sender, event))

    def break_stream(self) -> None:
        """What was under way on it is lost, both ways; the agent says again what is unanswered."""
        node = self.rng.choice(self.nodes)
        self.wire = [(n, event) for n, event in self.wire if n != node]
        self.answers = [reply for reply in self.answers if reply.link != node]
        self.master.feed(ev.NodeAbsent(NodeId(node)), self.now)
        self.master.feed(ev.NodeReady(_member(node), Round(self.round), True), self.now)
        # What the master had decided but not written is answered to a link that is gone.
        self.answers += [reply for reply in self.master.write() if reply.link != node]
        self.repeat(node)

    def kill_master(self) -> None:
        self.master.compare()
        self.master.die(compacts=self.rng.random() < 0.5)
        self.wire, self.answers = [], []
        self.master.feed(ev.MasterStarted("x"), self.now)
        self.master.feed(ev.WorldFound(self._world(), 0, False), self.now)
        for node in self.nodes:
            self.master.feed(ev.NodeReady(_member(node), Round(self.round), True), self.now)
            self.repeat(node)

    def repeat(self, node: int) -> None:
        for worker in self.world + self.ghosts:
            if worker.node == node and worker.asked is not None:
                self.send(worker)
        self.wire += [(node, call) for call in self.marking[node]]

    # ---- the end --------------------------------------------------------------------------------

    def is_finished(self) -> bool:
        if self.follows:
            return Version(self.lineage, LAST_STEP) in self.master.versions
        return all(worker.state == "finished" for worker in self.world)

    def check_end(self) -> None:
        position = self.master.shards.position("train")
        assert position is not None
        assert not position.open, "something was never read"
        aside = {s for piece in position.aside for s in samples(piece, piece.begin, piece.end)}
        if not self.follows:
            assert set(self.read) | aside == self.everything
            if not self.faults:
                assert max(self.read.values(), default=1) == 1
                assert aside.isdisjoint(self.read)
            return
        last = Version(self.lineage, LAST_STEP)
        ranks = self.models[last]
        final = Counter(self.base + [s for rank in ranks.values() for s in rank])
        assert not [sample for sample, times in final.items() if times > 1], "read twice"
        assert set(final) | aside == self.everything, "lost"
        assert aside.isdisjoint(final)
        assert not self.poison & set(final)


def _member(node: int) -> Member:
    return Member(
        node_id=NodeId(node),
        incarnation=Incarnation(node + 1),
        node_rank=NodeRank(node),
        nproc=2,
        host="h",
        store_port=1,
    )
