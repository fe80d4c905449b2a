# SPDX-License-Identifier: Apache-2.0
"""The network between agents and the master: streams as TCP provides them.

Bytes arrive in order and once, late or never. A stream that breaks loses the bytes under way in
both directions, and both ends learn of the break: the request is lost, or it was carried out and
its answer is lost. If a stream is left half open, only the agent learns of the break and comes back
on another stream, while the master still gets the bytes of the old one. A partition holds bytes
back, in one direction or in both, and neither end notices; when it is over, the bytes that it held
back arrive. The frames are real.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol

from holdfast.protocol import codec
from holdfast.protocol import messages as m
from holdfast.sim.clock import Clock, Promise

CONNECT_S = 5.0
"""As in agent/stream.py: how long a try to connect takes when nothing comes back."""

UP, DOWN = "up", "down"
"""The directions: to the master, and from it."""


INSIDE = "inside "
"""Prefix of a machine's name: traffic inside that machine, which needs no network."""


class End(Protocol):
    """One end of a link: an agent or the master."""

    def received(self, link: "Link", frame: m.Frame) -> None: ...

    def closed(self, link: "Link") -> None: ...


class Server(End, Protocol):
    """A master that listens."""

    def opened(self, link: "Link") -> None: ...


class Stream(Protocol):
    """What the network can do to a connection."""

    @property
    def place(self) -> str: ...

    def abort(self, late_s: float) -> None: ...

    def let_through(self) -> None: ...


class Pipe:
    """One direction of a link."""

    def __init__(self, network: "Network", place: str, way: str) -> None:
        self._network = network
        self._place = place
        self._way = way
        self._arrives_at = 0.0
        self._held_back: list[Callable[[], None]] = []
        self._stands_until = 0.0

    def stand_still(self, until: float) -> None:
        """Deliver nothing before that time."""
        self._stands_until = until

    def carry(self, arrive: Callable[[], None]) -> None:
        """Deliver something after everything before it."""
        clock = self._network.clock
        at = clock.now + self._network.delay(self._place)
        self._arrives_at = max(self._arrives_at, at)
        clock.at(self._arrives_at, lambda: self._arrive(arrive))

    def _arrive(self, arrive: Callable[[], None]) -> None:
        if self._network.clock.now < self._stands_until:
            self._network.clock.at(self._stands_until, lambda: self._arrive(arrive))
        elif self._held_back or self._network.is_blocked(self._place, self._way):
            self._held_back.append(arrive)
        else:
            arrive()

    def let_through(self) -> None:
        held_back, self._held_back = self._held_back, []
        for arrive in held_back:
            self.carry(arrive)


class Link:
    """One connection between the agent at a place and the master."""

    def __init__(self, network: "Network", number: int, place: str, agent: End, master: End):
        self.number = number
        self.place = place
        self._network = network
        self._ends = {UP: master, DOWN: agent}
        self._pipes = {way: Pipe(network, place, way) for way in (UP, DOWN)}
        #: Directions whose receiving end still listens.
        self._listening = {UP, DOWN}

    def send(
        self,
        way: str,
        body: m.AnyMessage,
        call: int = 0,
        session: str = "",
        seq: int = 0,
        position: int = 0,
    ) -> None:
        payload = codec.encode(body, call, session, seq, position)[4:]
        self._pipes[way].carry(lambda: self._received(way, payload))
        if not isinstance(body, m.Beat) and self._network.must_break(self.place, way):
            self.abort(0.0)

    def _received(self, way: str, payload: bytes) -> None:
        if way in self._listening:
            self._ends[way].received(self, codec.decode(payload))

    def close(self, way: str) -> None:
        """The sender of this direction closes, or dies: what it sent before still arrives."""
        other = DOWN if way == UP else UP
        self._listening.discard(other)
        self._pipes[way].carry(lambda: self._lost(way))

    def abort(self, late_s: float) -> None:
        """The stream breaks, and the bytes under way are lost. With `late_s` the master learns of
        the break that much later, and bytes that were on their way to it still arrive."""
        clock = self._network.clock
        clock.after(0.0, partial(self._lost, DOWN))
        if late_s:
            self._pipes[UP].stand_still(clock.now + late_s)
            self._pipes[UP].carry(partial(self._lost, UP))
        else:
            clock.after(0.0, partial(self._lost, UP))

    def _lost(self, way: str) -> None:
        if way in self._listening:
            self._listening.discard(way)
            self._ends[way].closed(self)
        if not self._listening:
            self._network.forget(self.number)

    def let_through(self) -> None:
        for pipe in self._pipes.values():
            pipe.let_through()


class Network:
    """All links, and their faults."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        self.clock = clock
        self._rng = rng
        self._links: dict[int, Stream] = {}
        self._next_link = 0
        self._blocked: dict[tuple[str, str], float] = {}
        self._master_cut_until = 0.0
        self._slow: dict[str, float] = {}
        #: By place and direction: until when the next frame breaks its stream.
        self._break_next: dict[tuple[str, str], float] = {}
        self.master: Server | None = None
        """The master that listens now."""

    def connect(self, place: str, agent: End) -> Promise[Link | None]:
        """Try to reach the master; None if it does not answer."""
        promise: Promise[Link | None] = Promise(self.clock)
        if self.is_blocked(place, UP) or self.is_blocked(place, DOWN):
            self.clock.after(CONNECT_S, lambda: promise.keep(None))
        else:
            self.clock.after(2 * self.delay(place), lambda: self._open(place, agent, promise))
        return promise

    def _open(self, place: str, agent: End, promise: Promise[Link | None]) -> None:
        if self.master is None:
            promise.keep(None)
            return
        link = Link(self, self._next_link + 1, place, agent, self.master)
        self.add(link)
        self.master.opened(link)
        promise.keep(link)

    def add(self, link: Stream) -> int:
        """Add a connection; returns its number."""
        self._next_link += 1
        self._links[self._next_link] = link
        return self._next_link

    def forget(self, number: int) -> None:
        self._links.pop(number, None)

    def delay(self, place: str) -> float:
        """How long bytes take now."""
        usual = self._rng.uniform(0.0005, 0.01)
        return usual * 100 if self._slow.get(place, 0.0) > self.clock.now else usual

    # ---- what goes wrong ------------------------------------------------------------------------

    def break_streams(self, place: str, late_s: float = 0.0) -> None:
        """Break the agent's streams; the master learns of it `late_s` later than the agent."""
        for link in self._of(place):
            link.abort(late_s)

    def lose_next(self, place: str, way: str, seconds: float) -> None:
        """The next frame within this time, except beats, is lost with its stream."""
        self._break_next[place, way] = self.clock.now + seconds

    def must_break(self, place: str, way: str) -> bool:
        return self._break_next.pop((place, way), 0.0) > self.clock.now

    def partition(self, place: str, ways: tuple[str, ...], seconds: float) -> None:
        """Nothing gets through in these directions for a while."""
        until = self.clock.now + seconds
        for way in ways:
            self._blocked[place, way] = max(until, self._blocked.get((place, way), 0.0))
        self.clock.after(seconds, lambda: self._let_through(place))

    def cut_master(self, seconds: float) -> None:
        """The master's own network is down for a while; the nodes reach each other."""
        until = self.clock.now + seconds
        self._master_cut_until = max(until, self._master_cut_until)
        self.clock.after(seconds, self._let_all_through)

    def slow_down(self, place: str, seconds: float) -> None:
        self._slow[place] = self.clock.now + seconds

    def is_blocked(self, place: str, way: str) -> bool:
        """Whether nothing gets through between this place and the master."""
        is_cut = self._master_cut_until > self.clock.now and not place.startswith(INSIDE)
        return is_cut or self.is_cut_off(place, way)

    def is_cut_off(self, place: str, way: str) -> bool:
        """Whether a partition cuts the place off from everything."""
        return self._blocked.get((place, way), 0.0) > self.clock.now

    def _let_all_through(self) -> None:
        for link in list(self._links.values()):
            link.let_through()

    def _let_through(self, place: str) -> None:
        for link in self._of(place):
            link.let_through()

    def _of(self, place: str) -> list[Stream]:
        return [link for link in self._links.values() if link.place == place]
