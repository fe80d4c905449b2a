# SPDX-License-Identifier: Apache-2.0
"""The master: the real core and the real records, under a thin model of its driver and its links.

It does what runtime/loop.py and master/service.py do: commands leave when the records of their step
and of all steps before are on the disk; a node without a link is absent; at the end the master
tells every agent. It can be killed at any time, and starts again from what the disk has.
"""

from collections.abc import Callable

from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.job.flow import JobCore, build
from holdfast.core.job.records import decode_record, encode_record
from holdfast.core.job.requests import event_of
from holdfast.core.kernel import Command, Event, Record, Tick
from holdfast.model.ids import NodeId
from holdfast.ports.journal import Entry
from holdfast.protocol import messages as m
from holdfast.protocol.services import Sender, may_send
from holdfast.sim.clock import Timer
from holdfast.sim.disk import Disk
from holdfast.sim.network import DOWN, Link
from holdfast.sim.stage import Stage

FAREWELL_S = 15.0
"""As in master/service.py: how long a finished master waits for an agent it hears nothing of."""


class Master:
    """One life of a master process, from its start to its death or the end of the job."""

    def __init__(
        self, stage: Stage, disk: Disk, number: int, *, ended: Callable[["Master", bool], None]
    ) -> None:
        """`ended` is called when the master is done with the job, or (False) had to give up."""
        self._stage = stage
        self._clock = stage.clock
        self._disk = disk
        self._ended = ended
        self.is_alive = True
        self.core, self._position = _replayed(stage, disk), disk.end
        self._entries: list[Entry] = []
        self._records: list[Record] = []
        self._facts: list[Event] = []
        self._commands: list[Command] = []
        self._is_writing = False
        self._since_snapshot = 0
        self._timer: Timer | None = None
        self._links: dict[int, Link] = {}
        self._node_of: dict[int, NodeId] = {}
        self._link_of: dict[NodeId, Link] = {}
        #: By link: the key of an agent whose admission is being written to the disk.
        self._attaching: dict[int, str] = {}
        #: By link: the key of the agent that was admitted on it.
        self._key_of: dict[int, str] = {}
        self._in_job: set[NodeId] = set()
        self._is_finishing = False
        self._heard_at = 0.0
        self._number = number

    def start(self) -> None:
        self._stage.network.master = self
        untold = [decode_record(entry.payload) for entry in self._disk.untold]
        self._stage.checkers.durable(untold, ())
        self.feed(ev.MasterStarted(f"m{self._number}", self._position))
        if self._stage.scenario.managed:
            self._stage.platform.watch(self.feed)
            self._stage.desk.watch(lambda plan: self.feed(ev.PlanAsked(plan)))

    def kill(self) -> None:
        """The process dies: the kernel closes its links, the disk keeps what it has."""
        if not (self._entries or self._is_writing or self._commands):
            self._stage.checkers.replay_is_exact(self.core, _replayed(self._stage, self._disk))
        self._die()
        self._disk.crash()

    def _die(self) -> None:
        self.is_alive = False
        if self._timer is not None:
            self._timer.cancel()
        self._stage.network.master = None
        for link in self._links.values():
            link.close(DOWN)

    # ---- the driver -----------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Let the core handle an event; its commands follow when its records are durable."""
        if not self.is_alive:
            return
        now = self._clock.now
        outcome = self.core.core.handle(event, now)
        for fact in (event, *outcome.facts):
            self._count(fact)
        self._entries += [Entry(now, now, encode_record(record)) for record in outcome.records]
        self._records += outcome.records
        self._facts += outcome.facts
        self._commands += outcome.commands
        if not self._is_writing:
            self._write()
        self._arm()

    def _write(self) -> None:
        if not self._entries:
            self._leave()
            return
        seconds = self._disk.write(self._entries, self._clock.now)
        if seconds is None:
            self._stage.history.note("the disk is full: the master stops")
            self._die()
            self._ended(self, False)
            return
        self._is_writing = True
        self._since_snapshot += len(self._entries)
        batch = (self._records, self._facts, self._commands)
        self._entries, self._records, self._facts, self._commands = [], [], [], []
        self._clock.after(seconds, lambda: self._written(*batch))

    def _written(self, records: list[Record], facts: list[Event], commands: list[Command]) -> None:
        if not self.is_alive:
            return
        self._disk.sync()
        self._position = self._disk.end
        self._is_writing = False
        self._release(records, facts, commands)
        if self._since_snapshot >= self._stage.scenario.compact_after and not self._entries:
            self._disk.compact(_snapshot(self.core, self._clock.now))
            self._since_snapshot = 0
        if self._entries or self._commands:
            self._write()

    def _leave(self) -> None:
        """Send the commands at once if there are no records to write."""
        (facts, self._facts), (commands, self._commands) = (self._facts, []), (self._commands, [])
        self._release([], facts, commands)

    def _release(self, records: list[Record], facts: list[Event], commands: list[Command]) -> None:
        self._stage.checkers.durable(records, facts)
        for command in commands:
            self._execute(command)

    def _arm(self) -> None:
        at = self.core.core.deadline()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at is None else self._clock.at(at, lambda: self.feed(Tick()))

    # ---- frames in ------------------------------------------------------------------------------

    def opened(self, link: Link) -> None:
        self._links[link.number] = link

    def received(self, link: Link, frame: m.Frame) -> None:
        if not self.is_alive:
            return
        body, node_id = frame.body, self._node_of.get(link.number)
        if self._is_finishing and node_id is not None:
            self._heard_at = self._clock.now
        if isinstance(body, m.Beat):
            if node_id is not None:
                self.feed(ev.BeatReceived(node_id, body))
                link.send(DOWN, m.Done(), frame.call, position=self._position)
        elif isinstance(body, m.Dropped):
            self.feed(ev.RequestDropped(body.session, body.seq))
        elif node_id is None and not may_send(Sender.ANYONE, body):
            link.send(DOWN, m.Refused("rejected", "it came before the attach"), frame.call)
        elif (event := event_of(node_id, link.number, frame)) is not None:
            if isinstance(body, m.Attach):
                self._attaching[link.number] = body.agent_key
            self.feed(event)
        else:
            # The model has no observers, and its agents leave without a message.
            raise AssertionError(f"nothing here answers {type(body).__name__}")

    def closed(self, link: Link) -> None:
        self._links.pop(link.number, None)
        node_id = self._node_of.pop(link.number, None)
        agent_key = self._key_of.pop(link.number, "")
        if node_id is not None and self._link_of.get(node_id) is link:
            del self._link_of[node_id]
            if self._is_finishing:
                self._out_of_job(node_id)
            if agent_key not in self._attaching.values():  # As in master/service.py.
                self.feed(ev.NodeAbsent(node_id))

    # ---- commands out ---------------------------------------------------------------------------

    def _execute(self, command: Command) -> None:
        match command:
            case cmd.Push():
                link = self._link_of.get(command.node_id)
                if link is not None:
                    link.send(DOWN, command.body, position=self._position)
            case cmd.Reply():
                if isinstance(command.body, m.Refused):
                    self._attaching.pop(command.link, None)
                link = self._links.get(command.link)
                if link is not None:
                    link.send(DOWN, command.body, command.call, position=self._position)
            case cmd.Bind():
                self._bind(command)
            case cmd.Drop():
                link = self._link_of.pop(command.node_id, None)
                if link is not None:
                    self._hang_up(link)
            case cmd.LaunchNode():
                self._stage.platform.launch(command.order)
            case cmd.RemoveNode():
                self._stage.platform.remove(command.node_id)
            case cmd.AnswerPlan():
                self._stage.desk.answer(command.plan_id)
            case cmd.FinishJob():
                self._finish(command.end)
            case _:
                raise AssertionError(f"nobody executes {type(command).__name__}")

    def _hang_up(self, link: Link) -> None:
        self._node_of.pop(link.number, None)
        self._links.pop(link.number, None)
        link.close(DOWN)

    def _bind(self, command: cmd.Bind) -> None:
        older = self._link_of.pop(command.node_id, None)
        if older is not None and older.number != command.link:
            self._hang_up(older)
        link = self._links.get(command.link)
        agent_key = self._attaching.pop(command.link, "")
        if link is None:
            # As in master/service.py: if it is back on another link, that admission follows.
            if agent_key not in self._attaching.values():
                self.feed(ev.NodeAbsent(command.node_id))
            return
        self._link_of[command.node_id] = link
        self._node_of[link.number] = command.node_id
        self._key_of[link.number] = agent_key

    # ---- the end --------------------------------------------------------------------------------

    def _count(self, fact: Event) -> None:
        match fact:
            case ev.NodeReady():
                self._in_job.add(fact.member.node_id)
            case ev.NodeExpected():
                self._in_job.add(fact.node_id)
            case ev.NodeLost():
                self._out_of_job(fact.node_id)

    def _out_of_job(self, node_id: NodeId) -> None:
        self._in_job.discard(node_id)
        if self._is_finishing and not self._in_job:
            self._clock.after(0.0, self._all_told)

    def _finish(self, end: m.JobEnded) -> None:
        self._is_finishing = True
        self._heard_at = self._clock.now
        self._stage.history.note(f"the job ends: ok={end.ok} {end.reason}")
        for link in self._link_of.values():
            link.send(DOWN, end, position=self._position)
        if self._in_job:
            self._clock.after(FAREWELL_S, self._farewell)
        else:
            self._clock.after(0.0, self._all_told)

    def _farewell(self) -> None:
        left_s = self._heard_at + FAREWELL_S - self._clock.now
        if left_s > 0:
            self._clock.after(left_s, self._farewell)
        else:
            self._all_told()

    def _all_told(self) -> None:
        if self.is_alive:
            self._die()
            self._ended(self, True)


def _snapshot(core: JobCore, now: float) -> list[Entry]:
    return [Entry(now, now, encode_record(record)) for record in core.core.snapshot()]


def _replayed(stage: Stage, disk: Disk) -> JobCore:
    """A core as a restarted master builds it: from the bytes on the disk."""
    core = build(stage.scenario.spec(), "job")
    core.core.check_every_step()
    for entry in disk.load():
        core.core.replay(decode_record(entry.payload))
    return core
