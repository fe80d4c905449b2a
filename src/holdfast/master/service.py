# SPDX-License-Identifier: Apache-2.0
"""The master's links: frames become events, commands become frames."""

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import cast

import msgspec

from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.job.flow import JobCore
from holdfast.core.job.requests import event_of
from holdfast.core.kernel import Command, Event
from holdfast.master.farewell import Farewell
from holdfast.master.history import History, entities_of
from holdfast.master.showing import Showing
from holdfast.master.stories import dataset_of, describe_progress, fields_of, level_of, tell
from holdfast.model.ids import NodeId
from holdfast.model.node import Phase
from holdfast.model.order import WORKER
from holdfast.ports.desk import Desk
from holdfast.ports.platform import Platform
from holdfast.protocol import messages as m
from holdfast.protocol.services import Sender, may_send
from holdfast.runtime.observe import Details, Level, Say, wall_clock
from holdfast.runtime.transport import Link

PROGRESS_S = 1.0
"""How often the followers of the job hear how it stands."""

ENTITIES_SHOWN = 50
"""How many are named to a person who asks for one that is not known."""

LINGER_S = 5.0
"""How long a master that found its job ended, and heard its nodes part, waits for followers of the
master before it: they look for this one."""

NO_NEWS = frozenset({ev.BeatReceived, ev.KvRequested, ev.DataRequested})
"""Events that come in by the thousand: no sentence is looked up for them."""

_DONE = m.Done()


class Service:
    """The connected agents and followers, and the way between links and the core."""

    def __init__(
        self,
        job: str,
        core: JobCore,
        *,
        now: Callable[[], float],
        say: Say,
        failed: Callable[[Exception], None],
        wall: Callable[[], float] = wall_clock,
        has_launcher: bool = False,
    ) -> None:
        self._job = job
        self._core = core
        self._now, self._wall = now, wall
        self._say, self._failed = say, failed
        self._has_launcher = has_launcher
        self._platform: Platform | None = None
        self._showing: Showing | None = None
        self._feed: Callable[[Event], None] = lambda event: None
        self._position: Callable[[], int] = lambda: 0
        self._follow: Callable[[Command], None] = self.execute
        self._links: dict[int, Link] = {}
        self._node_of: dict[int, NodeId] = {}
        self._link_of: dict[NodeId, Link] = {}
        self._followers: dict[int, Link] = {}
        self._followed = asyncio.Event()
        #: When this master started, and whether the job had ended before that.
        self._started_at = -1.0
        self._had_ended = False
        #: By link: the key of an agent whose admission is on its way to the disk.
        self._attaching: dict[int, str] = {}
        #: How many such links each of these keys has.
        self._coming: Counter[str] = Counter()
        #: By link: the key of the agent that was admitted on it.
        self._key_of: dict[int, str] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self.finished: asyncio.Future[m.JobEnded] = asyncio.get_running_loop().create_future()
        self._farewell = Farewell(now, say)
        self._is_finishing = False
        self._progress_timer: asyncio.TimerHandle | None = None
        #: Why nodes do not run yet, in the platform's words.
        self._waiting: dict[NodeId, str] = {}
        self._history = History()

    @property
    def is_finishing(self) -> bool:
        """Whether the job has ended, or is stopped, and agents are on their way out."""
        return self._is_finishing

    def cut_farewell_short(self) -> None:
        """Wait for no agent at the end."""
        self._farewell.cut_short()

    def connect_core(
        self,
        feed: Callable[[Event], None],
        position: Callable[[], int],
        follow: Callable[[Command], None],
    ) -> None:
        """Connect the core: `feed` takes events, `position` says how far the journal is, and
        `follow` executes a command after all that was decided before. Called once, before anything
        is served."""
        self._feed, self._position, self._follow = feed, position, follow

    def use_platform(self, platform: Platform) -> None:
        """The platform that launches and removes nodes, in a job that is managed."""
        self._platform = platform

    def use_desk(self, desk: Desk) -> None:
        """The desk where people ask for changes and see the job, if there is one."""
        self._showing = Showing(desk, self.view, self._run)

    def view(self) -> dict[str, object]:
        """The job as /api/v1/job and `holdfast status` show it."""
        now, wall_s = self._now(), self._wall()
        view = {
            "job": self._job,
            "time_s": round(now, 3),
            "wall_s": round(wall_s, 3),
            "started_wall_s": round(wall_s - now, 3),
            "attached": len(self._link_of),
            **self._core.view(now),
        }
        if self._waiting:
            for row in cast(list[dict[str, object]], view["nodes"]):
                row["message"] = self._waiting.get(cast(NodeId, row["node_id"]), row["message"])
        return view

    def history(self, entity: str) -> m.History:
        """What was told of an entity; if that is nothing, of what something was."""
        stories = self._history.of(entity)
        entities = () if stories else self._history.entities()[:ENTITIES_SHOWN]
        return m.History(stories, entities)

    # ---- frames in ------------------------------------------------------------------------------

    def opened(self, link: Link) -> None:
        self._links[link.number] = link

    def received(self, link: Link, frame: m.Frame) -> None:
        body, node_id = frame.body, self._node_of.get(link.number)
        if self._is_finishing and node_id is not None:
            self._farewell.heard(node_id, body)
        if isinstance(body, m.Beat):
            # A beat of an agent that is not admitted, or no longer, says nothing.
            if node_id is not None:
                self._beat(link.number, node_id, frame.call, body)
        elif isinstance(body, m.Dropped):
            self._feed(ev.RequestDropped(body.session, body.seq))
        elif node_id is None and not may_send(Sender.ANYONE, body):
            _refuse(link, frame, "came before the agent was attached")
        elif (event := event_of(node_id, link.number, frame)) is not None:
            if isinstance(body, m.Attach):
                self._attaches(link.number, body)
            self._feed(event)
        else:
            self._answer(link, node_id, frame)

    def _beat(self, link: int, node_id: NodeId, call: int, beat: m.Beat) -> None:
        self._feed(ev.BeatReceived(node_id, beat))
        # An answer renews the lease: there must be none once it is decided that the node is lost.
        self._follow(cmd.Reply(link, call, _DONE))
        if self._showing is not None:
            self._showing.progressed()

    def _answer(self, link: Link, node_id: NodeId | None, frame: m.Frame) -> None:
        """Answer what is not for the core; refuse it if nothing in the master answers it."""
        match frame.body:
            case m.Observe():
                self._observe(link, frame.call, frame.body)
            case m.HistoryAsk():
                link.send(self.history(frame.body.entity), frame.call)
            case m.Parting() if node_id is not None:
                self._farewell.parting(node_id, frame.body.doubt)
                self._follow(cmd.Reply(link.number, frame.call, _DONE))
            case _:
                _refuse(link, frame, "is not a request")

    def _attaches(self, link: int, body: m.Attach) -> None:
        """An agent asks for its admission; an earlier request of it on this link is void."""
        self._came(link)
        self._attaching[link] = body.agent_key
        self._coming[body.agent_key] += 1
        self._farewell.gives_grace(body.grace_s)

    def closed(self, link: Link) -> None:
        self._links.pop(link.number, None)
        self._followers.pop(link.number, None)
        node_id = self._node_of.pop(link.number, None)
        agent_key = self._key_of.pop(link.number, "")
        if node_id is not None and self._link_of.get(node_id) is link:
            del self._link_of[node_id]
            if self._is_finishing:
                self._farewell.hung_up(node_id)
            elif self._platform is not None:
                self._platform.look_again()
            # If the agent's admission on another link is on its way to the disk, the core has heard
            # of it already: it would take the end of this link for that of the newer one.
            if agent_key not in self._coming:
                self._feed(ev.NodeAbsent(node_id))

    def _observe(self, link: Link, call: int, body: m.Observe) -> None:
        if body.follow:
            self._followers[link.number] = link
            self._followed.set()
            if self._progress_timer is None:
                self._tell_progress_again()
        link.send(m.Observed(msgspec.json.encode(self.view())), call)

    def _tell_progress_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._progress_timer = loop.call_later(PROGRESS_S, self._tell_progress)

    def _tell_progress(self) -> None:
        """Send one line on how the job stands to its followers, for as long as there are any."""
        self._progress_timer = None
        if not self._followers:
            return
        self._tell_progress_again()
        story = m.Story(self._now(), "Progress", describe_progress(self.view()), {})
        for link in self._followers.values():
            link.send(story)

    def observe(self, event: Event, now: float) -> None:
        """Say what happened, here and to the followers."""
        if type(event) in NO_NEWS:
            return
        match event:
            case ev.NodeReady():
                self._farewell.joined(event.member.node_id)
            case ev.NodeExpected():
                self._farewell.joined(event.node_id)
            case ev.NodeLost():
                self._farewell.left(event.node_id)
            case ev.NodeSeen():
                self._seen(event)
            case ev.MasterStarted():
                self._started_at = now
            case ev.JobFinished():
                self._had_ended = now == self._started_at
        # After the end every node leaves: that is no news.
        is_over = self._is_finishing and isinstance(event, ev.NodeAbsent | ev.NodeLost)
        text = "" if is_over else tell(event)
        if not text:
            self._say(Details(event), Level.DEBUG)
            return
        # The launcher, on the same terminal, says itself how its job ended.
        is_said = self._has_launcher and isinstance(event, ev.JobFinished) and not event.ok
        if not is_said:
            self._say(text, level_of(event))
        if self._showing is not None:
            self._showing.happened(event, text)
        fields = fields_of(event, self._core.progress.incident_of)
        story = m.Story(now, type(event).__name__, text, fields)
        node_id = fields.get("node_id")
        node = self._core.name_of(NodeId(node_id)) if isinstance(node_id, int) else ""
        if not node and (rank := fields.get("node_rank", -1)) != -1:
            # Of a fact that has no node id. Ranks of roles count from 0 each.
            role = event.role if isinstance(event, ev.RankGivenUp) else WORKER
            node = f"node/{rank}" if role == WORKER else f"{role}/{rank}"
        self._history.add(entities_of(fields, node, dataset_of(event)), story)
        for link in self._followers.values():
            link.send(story)

    def _seen(self, event: ev.NodeSeen) -> None:
        """Keep the reason why a node does not run yet: the core does not need it, but people do."""
        if event.phase is Phase.PENDING:
            self._waiting[event.node_id] = event.message
        else:
            self._waiting.pop(event.node_id, None)
        if self._showing is not None:
            self._showing.changed()

    # ---- commands out ---------------------------------------------------------------------------

    def execute(self, command: Command) -> None:
        """Do what the core decided. Everything it decided from is durable by now."""
        match command:
            case cmd.Push():
                link = self._link_of.get(command.node_id)
                if link is not None:
                    link.send(command.body, position=self._position())
            case cmd.Reply():
                if isinstance(command.body, m.Refused):
                    self._came(command.link)
                link = self._links.get(command.link)
                if link is not None:
                    link.answer(command.body, command.call, self._position())
            case cmd.Bind():
                self._bind(command)
            case cmd.Drop():
                link = self._link_of.pop(command.node_id, None)
                if link is not None:
                    self._node_of.pop(link.number, None)
                    link.close()
            case cmd.LaunchNode() if self._platform is not None:
                self._run(self._platform.launch(command.order), is_command=True)
            case cmd.RemoveNode() if self._platform is not None:
                self._run(self._platform.remove(command.node_id), is_command=True)
            case cmd.AnswerPlan() if self._showing is not None:
                self._showing.settled(command.plan_id, ok=command.ok, text=command.text)
            case cmd.FinishJob():
                self._run(self._finish(command.end), is_command=True)

    def _came(self, link: int) -> str:
        """The admission on this link is decided; returns the key of its agent, if there was one."""
        agent_key = self._attaching.pop(link, "")
        self._coming[agent_key] -= 1
        if self._coming[agent_key] <= 0:
            del self._coming[agent_key]
        return agent_key

    def _bind(self, command: cmd.Bind) -> None:
        older = self._link_of.pop(command.node_id, None)
        if older is not None and older.number != command.link:
            self._node_of.pop(older.number, None)
            older.close()
        link = self._links.get(command.link)
        agent_key = self._came(command.link)
        if link is None:
            # It hung up while its admission was on its way to the disk. If it is back on another
            # link already, that admission follows this one.
            if agent_key not in self._coming:
                self._feed(ev.NodeAbsent(command.node_id))
            return
        self._link_of[command.node_id] = link
        self._node_of[link.number] = command.node_id
        self._key_of[link.number] = agent_key

    def _run(self, errand: Coroutine[None, None, None], *, is_command: bool = False) -> None:
        task = asyncio.get_running_loop().create_task(errand)
        self._errands.add(task)
        task.add_done_callback(partial(self._errand_ended, is_command=is_command))

    def _errand_ended(self, task: "asyncio.Task[None]", *, is_command: bool) -> None:
        self._errands.discard(task)
        if task.cancelled() or not isinstance(exc := task.exception(), Exception):
            return
        if is_command:
            # The core counts on it: the next master finds it undone in the journal.
            self._failed(exc)
        else:
            self._say("".join(traceback.format_exception(exc)), Level.ERROR)

    async def _finish(self, end: m.JobEnded) -> None:
        """Tell every agent, also those that come back only now, and wait until all hung up."""
        self._is_finishing = True
        for link in list(self._link_of.values()):
            link.send(end, position=self._position())
        doubt = await self._farewell.wait()
        if self._had_ended and self._farewell.has_heard_any:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._followed.wait(), LINGER_S)
        if self._showing is not None:
            self._showing.show()
        # Only a follower that hears this knows that the job is over, and not just its master.
        word = m.Story(self._now(), m.LAST_WORD, doubt, {})
        for link in list(self._followers.values()):
            link.send(word)
            link.close()
        if not self.finished.done():
            self.finished.set_result(end)


def _refuse(link: Link, frame: m.Frame, why: str) -> None:
    link.send(m.Refused("rejected", f"{type(frame.body).__name__} {why}"), frame.call)
