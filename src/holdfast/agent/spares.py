# SPDX-License-Identifier: Apache-2.0
"""Keeps warm spares: processes that have imported what the workers import, ready to take over.

What the workers import is learned from them. Once they have been quiet for a moment a zygote is
started and taught the same imports; from then on a worker is a fork away. Where a module makes
forking unsafe, one-shot spares stand by instead; where nothing works, workers start cold.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from holdfast.agent.children import Brood, Child, Status
from holdfast.worker.bootstrap import PROGRAM, Assignment
from holdfast.worker.zygote import MESSAGE_BYTES_MAX, Settings, is_per_rank

_QUIET_S = 1.0
_ANSWER_TIMEOUT_S = 2.0
_IMPORT_TIMEOUT_S = 120.0
_PATIENCE_S = 30.0
"""How long a worker waits for a spare that is still importing, before it imports itself."""
_FIRST_BATCH = 200
_EARLY_DEATHS_MAX = 3
_COMMAND_LINE_BYTES = 1024
_LEFT_OUT_MAX = 8


class SpareGoneError(Exception):
    """A spare ended, or does not answer."""


class TaintedError(Exception):
    """A module has made a spare unusable as it is."""

    def __init__(self, *, module: str, kind: str, why: str) -> None:
        super().__init__(f"{module}: {why}")
        self.module = module
        self.kind = kind
        self.why = why


class Spare:
    """One warm process and the conversation with it: answers come in order."""

    child: Child
    """Known once the process has been started."""

    def __init__(self, env: Mapping[str, str], *, how: str, taught: int = 0) -> None:
        self.env = env
        self.how = how
        self.taught = taught
        self.is_ready = False
        self._answers: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._socket, self.its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._receive)

    async def ask(
        self, message: Mapping[str, Any], fds: Sequence[int] = (), timeout_s: float | None = None
    ) -> dict[str, Any]:
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise SpareGoneError(f"it cannot be reached ({error.strerror})") from error
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._answers.append(answer)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise SpareGoneError(f"it did not answer within {timeout_s:g} s") from error

    async def learn(self, lessons: "Lessons") -> None:
        """Let the spare import what it does not know yet."""
        while self.taught < len(lessons.names) or not self.is_ready:
            # One by one once it is in service, so that a request to start a worker gets in between.
            end = min(self.taught + (1 if self.is_ready else _FIRST_BATCH), len(lessons.names))
            wanted = lessons.wanted(self.taught, end)
            answer = await self.ask({"imports": wanted}, timeout_s=_IMPORT_TIMEOUT_S)
            if answer["answer"] == "tainted":
                raise TaintedError(**{k: answer[k] for k in ("module", "kind", "why")})
            self.taught = end
            self.is_ready = self.is_ready or end >= len(lessons.names)

    def let_go(self) -> None:
        """End the conversation; the process lives on as a worker."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(SpareGoneError("it ended"))
        self._answers.clear()

    def end(self) -> None:
        self.let_go()
        self.child.on_exit = _ignore
        self.child.signal_group(signal.SIGKILL)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(MESSAGE_BYTES_MAX)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:
            data = b""
        if not data:
            self.let_go()
            return
        answer = self._answers.popleft()
        if not answer.done():
            answer.set_result(json.loads(data))


def _ignore(_status: Status) -> None:
    pass


class Lessons:
    """What the workers imported, in order, and what must not be preloaded."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.left_out: set[str] = set()
        self._known: set[str] = set()

    def add(self, names: Iterable[str]) -> bool:
        """Whether any of them is new."""
        new = [name for name in names if name not in self._known]
        self._known.update(new)
        self.names.extend(new)
        return bool(new)

    def wanted(self, start: int, end: int) -> list[str]:
        """The names from `start` to `end` that are to be imported."""
        return [n for n in self.names[start:end] if _package(n) not in self.left_out]


class Spares:
    """Decides which spares to keep, and hands them out."""

    def __init__(
        self,
        *,
        brood: Brood,
        enabled: bool,
        workers_wanted: Callable[[], int],
        say: Callable[[str], None],
        on_warm: Callable[[], None] = lambda: None,
    ) -> None:
        self._brood = brood
        self._on_warm = on_warm
        self._workers_wanted = workers_wanted
        self._say = _once(say)
        self._off = "" if enabled else "not wanted"
        self._lessons = Lessons()
        self._env: dict[str, str] | None = None
        self._zygote: Spare | None = None
        self._standby: list[Spare] = []
        self._forks = 0
        self._once = False
        self._early_deaths = 0
        #: Workers that wait for the imports of a spare.
        self._waiting: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._preparing: asyncio.Task[None] | None = None

    @property
    def enabled(self) -> bool:
        return not self._off

    @property
    def is_forking(self) -> bool:
        """Whether there may be a forked child that is not adopted yet."""
        return self._forks > 0

    @property
    def state(self) -> str:
        if self._off:
            return f"off: {self._off}"
        if self._are_enough():
            return "one-shot" if self._once else "ready"
        return "warming" if self._all() else "none"

    def _are_enough(self) -> bool:
        """Whether every worker would get a spare: forked from the zygote, or one that stands by."""
        if self._zygote is not None and self._zygote.is_ready:
            return True
        return 0 < self._workers_wanted() <= sum(spare.is_ready for spare in self._standby)

    def learn(self, names: Iterable[str]) -> None:
        if self._lessons.add(names):
            self._wait_for_quiet()

    @property
    def learned(self) -> tuple[str, ...]:
        return tuple(self._lessons.names)

    def preload(self, names: Iterable[str], env: Mapping[str, str]) -> None:
        """Take over what other nodes have learned, and prepare at once."""
        self._env = _shared_part(env)
        self.learn(names)
        if not self._off:
            self._quiet()

    def worker_started(self, env: Mapping[str, str]) -> None:
        """Spares are started with the environment of the newest worker."""
        self._env = _shared_part(env)
        self._wait_for_quiet()

    async def take(
        self,
        assignment: Assignment,
        env: Mapping[str, str],
        fds: Sequence[int],
        on_exit: Callable[[Status], None],
    ) -> tuple[Child, str] | None:
        """A worker made from a spare, or None: start it cold."""
        message = {"start": assignment.to_json(), "env": dict(env), "cwd": os.getcwd()}
        spare = None
        try:
            spare = await self._pick(_shared_part(env))
            if spare is None:
                return None
            answer = await spare.ask(message, fds, _ANSWER_TIMEOUT_S)
        except SpareGoneError as gone:
            self._say(f"The warm spare cannot be used, {gone}; the worker starts cold.")
            if spare is not None:
                spare.end()
            return None
        if answer["answer"] != "started":
            self._say(f"Warm spares are replaced, {answer['why']}; the worker starts cold.")
            spare.end()
            self._drop_all()
            return None
        spare.let_go()
        self._wait_for_quiet()  # Another one takes its place.
        spare.child.on_exit = on_exit
        return (spare.child, spare.how) if spare.child.is_running else None

    def close(self) -> None:
        self._turn_off("closed")
        if self._timer is not None:
            self._timer.cancel()
        if self._preparing is not None:
            self._preparing.cancel()

    def _all(self) -> list[Spare]:
        return [*self._standby, self._zygote] if self._zygote else self._standby.copy()

    async def _pick(self, shared_env: dict[str, str]) -> Spare | None:
        """A spare that no other worker gets."""
        if any(spare.env != shared_env for spare in self._all()):
            self._drop_all()
        if self._is_worth_waiting():
            await self._wait_for_imports()
        for spare in self._standby:
            if spare.is_ready:
                self._standby.remove(spare)
                return spare
        if self._zygote is not None and self._zygote.is_ready:
            return await self._fork(self._zygote)
        return None

    def _is_worth_waiting(self) -> bool:
        """Whether a running import can serve one more worker: the import of a zygote serves all of
        them, that of a one-shot spare serves one."""
        if self._zygote is not None:
            return not self._zygote.is_ready
        importing = sum(not spare.is_ready for spare in self._standby)
        return importing == len(self._standby) and importing > len(self._waiting)

    async def _wait_for_imports(self) -> None:
        """Waiting is quicker: the spare is ahead of a worker that would begin with the same imports
        now, and two processes that import compete for the cores."""
        imported = self._loop.create_future()
        self._waiting.add(imported)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await imported
        except TimeoutError:
            self._say(f"The warm spare still imports after {_PATIENCE_S:g} s.")
        finally:
            self._waiting.discard(imported)

    def stop_waiting(self) -> None:
        """Let workers that wait for imports start with what there is."""
        for imported in self._waiting:
            if not imported.done():
                imported.set_result(None)

    def _drop_all(self) -> None:
        for spare in self._all():
            spare.end()
        self._standby.clear()
        self._zygote = None
        self.stop_waiting()
        self._wait_for_quiet()

    def _wait_for_quiet(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._off and self._lessons.names:
            self._timer = self._loop.call_later(_QUIET_S, self._quiet)

    def _quiet(self) -> None:
        if self._preparing is None or self._preparing.done():
            self._preparing = self._loop.create_task(self._prepare())

    async def _prepare(self) -> None:
        """Bring the spares up to date. One at a time: the cores belong to the training."""
        while not self._off and self._env is not None:
            try:
                if self._once:
                    await self._prepare_one_shots(self._env)
                else:
                    await self._prepare_forks(self._env)
                self._on_warm()
                return
            except TaintedError as tainted:
                self._adapt_to(tainted)
            except SpareGoneError:
                self._wait_for_quiet()
                return
            except OSError as error:
                self._turn_off(f"a spare cannot be started: {error.strerror}")

    async def _prepare_one_shots(self, env: dict[str, str]) -> None:
        for spare in self._standby.copy():
            await self._teach(spare)
        while len(self._standby) < self._workers_wanted():
            spare = self._spawn(env)
            self._standby.append(spare)
            await self._teach(spare)
            self.stop_waiting()

    async def _prepare_forks(self, env: dict[str, str]) -> None:
        """Forks stand by ahead of time: the two forks that make one cost 10 to 20 ms with torch."""
        zygote = self._zygote = self._zygote or self._spawn(env)
        await self._teach(zygote)
        self.stop_waiting()
        for spare in [s for s in self._standby if s.taught < zygote.taught]:
            self._standby.remove(spare)
            spare.end()
        while self._zygote is zygote and len(self._standby) < self._workers_wanted():
            spare = await self._fork(zygote)
            if self._zygote is not zygote:  # Replaced in the meantime, and its forks with it.
                spare.end()
                raise SpareGoneError("it was replaced")
            self._standby.append(spare)

    def _spawn(self, env: dict[str, str]) -> Spare:
        spare = Spare(env, how="one-shot" if self._once else "zygote")
        with spare.its_end as end:
            spare.child = self._brood.start(
                _command(end.fileno(), once=self._once),
                env,
                lambda status: self._died(spare, status),
                inherit=[end.fileno()],
            )
        return spare

    async def _fork(self, zygote: Spare) -> Spare:
        spare = Spare(zygote.env, how="zygote", taught=zygote.taught)
        self._forks += 1
        try:
            with spare.its_end as end:
                answer = await zygote.ask({"fork": True}, [end.fileno()], _ANSWER_TIMEOUT_S)
            if answer["answer"] != "forked":
                raise SpareGoneError(answer["why"])
            spare.child = self._brood.adopt(answer["pid"], lambda status: self._died(spare, status))
            spare.is_ready = True
        except SpareGoneError:
            if self._zygote is zygote:
                self._drop_all()
            raise
        finally:
            self._forks -= 1
            if not spare.is_ready:
                spare.let_go()
        return spare

    async def _teach(self, spare: Spare) -> None:
        try:
            await spare.learn(self._lessons)
        except SpareGoneError as gone:
            self._lost(spare, f"A warm spare cannot be prepared, {gone}.")
            raise
        except TaintedError:
            self._drop_all()
            raise

    def _adapt_to(self, tainted: TaintedError) -> None:
        module = f"The module {tainted.module} cannot be preloaded for forking"
        if tainted.kind == "thread":
            self._once = True
            self._say(f"{module}, because {tainted.why}; one-shot spares are used instead.")
            return
        self._lessons.left_out.add(_package(tainted.module))
        self._say(f"{module}, because {tainted.why}; each worker imports it itself.")
        if len(self._lessons.left_out) > _LEFT_OUT_MAX:
            self._turn_off("too many modules cannot be preloaded")

    def _died(self, spare: Spare, status: Status) -> None:
        how = "by signal" if status.si_code != os.CLD_EXITED else "with code"
        self._lost(spare, f"A warm spare ended {how} {status.si_status}; a new one will follow.")

    def _lost(self, spare: Spare, sentence: str) -> None:
        """Report the loss of a spare and end it, once: both its exit and a failed request lead
        here."""
        if spare is self._zygote:
            self._zygote = None
            self.stop_waiting()
        elif spare in self._standby:
            self._standby.remove(spare)
            self.stop_waiting()
        else:
            return
        spare.end()
        self._say(sentence)
        if not spare.is_ready:
            self._early_deaths += 1
            if self._early_deaths >= _EARLY_DEATHS_MAX:
                self._turn_off("spares die while they import the workers' modules")
        self._wait_for_quiet()

    def _turn_off(self, reason: str) -> None:
        self._off = reason
        self._drop_all()


def _once(say: Callable[[str], None]) -> Callable[[str], None]:
    """A `say` that does not repeat itself."""
    said: set[str] = set()

    def say_if_new(sentence: str) -> None:
        if sentence not in said:
            said.add(sentence)
            say(sentence)

    return say_if_new


def _command(socket: int, *, once: bool) -> list[str]:
    settings = Settings(agent_pid=os.getpid(), socket=socket, once=once)
    # The last argument only makes room for the command line of the worker it may become.
    room = " " * _COMMAND_LINE_BYTES
    return [sys.executable, "-u", PROGRAM, "spare", json.dumps(settings._asdict()), room]


def _package(module: str) -> str:
    return module.partition(".")[0]


def _shared_part(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not is_per_rank(name)}
