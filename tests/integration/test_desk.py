# SPDX-License-Identifier: Apache-2.0
"""What a master does with a desk, whichever it is."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.master import farewell
from holdfast.master.process import MasterSettings, run_master
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import WORKER, Order, Plan
from holdfast.model.role import RoleSpec
from holdfast.ports.platform import Sighting
from holdfast.ports.surroundings import Surroundings
from holdfast.protocol import messages as m
from holdfast.runtime.token import read_token
from holdfast.runtime.transport import connect
from tests.hearing import Heard
from tests.integration.live_master import RULES, HollowAgent

WAIT_S = 60.0


class PaperDesk:
    """A desk that hands in what the test writes, and keeps what it is told."""

    def __init__(self) -> None:
        self.handed_in: asyncio.Queue[Plan | None] = asyncio.Queue()
        self.answers: asyncio.Queue[tuple[str, bool, str]] = asyncio.Queue()
        self.views: asyncio.Queue[Mapping[str, object]] = asyncio.Queue()
        self.told: list[tuple[str, str]] = []
        self.is_closed = False

    async def plans(self) -> AsyncIterator[Plan]:
        while (plan := await self.handed_in.get()) is not None:
            yield plan

    async def answer(self, plan_id: str, *, ok: bool, text: str) -> None:
        self.answers.put_nowait((plan_id, ok, text))

    async def show(self, view: Mapping[str, object]) -> None:
        self.views.put_nowait(view)

    async def tell(self, kind: str, text: str) -> None:
        self.told.append((kind, text))

    async def close(self) -> None:
        self.is_closed = True


async def serve(
    folder: Path,
    desk: PaperDesk,
    spec: JobSpec | None = None,
    announce: Callable[[str], None] | None = None,
    said: Heard | None = None,
    **surroundings: Any,
) -> m.JobEnded | None:
    """A master beside this desk, without a platform unless one is given."""
    settings = MasterSettings(
        job="test",
        listen="127.0.0.1:0",
        state=folder / "state",
        token_file=None,
        http="",
        tls_cert=None,
        tls_key=None,
        insecure=False,
        spec=spec or JobSpec(),
    )
    said = Heard() if said is None else said
    return await run_master(
        settings,
        say=said,
        announce=announce or said,
        surroundings=Surroundings(make_desk=lambda: desk, **surroundings),
    )


def test_plans_are_answered_the_job_is_shown_and_ends_when_it_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def scene() -> None:
        desk = PaperDesk()
        serving = asyncio.create_task(serve(tmp_path, desk))
        async with asyncio.timeout(WAIT_S):
            first = await desk.views.get()
            assert first["state"] == "running"
            for _ in range(2):
                # Told twice, done once, and answered each time: an answer may have been lost.
                desk.handed_in.put_nowait(Plan(plan_id="grow", nodes=5))
            refusal = await desk.answers.get()
            assert refusal[:2] == ("grow", False)
            assert await desk.answers.get() == refusal
            assert "PlanSettled" in [kind for kind, _ in desk.told]
            desk.handed_in.put_nowait(None)
            end = await serving
        assert end is not None
        assert (end.ok, end.reason) == (False, "the job was deleted")
        assert desk.told[-1] == ("JobFailed", "the job failed: the job was deleted")
        last = first
        while not desk.views.empty():
            last = desk.views.get_nowait()
        assert (last["state"], last["reason"]) == ("failed", "the job was deleted")
        assert desk.is_closed

    asyncio.run(scene())


def test_a_desk_that_fails_ends_the_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the job would go on and nobody could say anything to it: better another master."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    class BrokenDesk(PaperDesk):
        async def plans(self) -> AsyncIterator[Plan]:
            yield await self.handed_in.get() or Plan(plan_id="")
            raise ValueError("the desk broke down")

    async def scene() -> None:
        desk = BrokenDesk()
        desk.handed_in.put_nowait(Plan(plan_id="p", nodes=2))
        with pytest.raises(ValueError, match="the desk broke down"):
            await asyncio.wait_for(serve(tmp_path, desk), WAIT_S)
        assert desk.is_closed

    asyncio.run(scene())


class PaperPlatform:
    """Every node runs as soon as it is ordered."""

    def __init__(self, known: Collection[NodeId]) -> None:
        self.known = set(known)
        self.was_looked_again = asyncio.Event()
        self._seen: asyncio.Queue[Sighting] = asyncio.Queue()

    async def launch(self, order: Order) -> None:
        self._seen.put_nowait(Sighting(node_id=order.node_id, phase=Phase.RUNNING))

    async def remove(self, node_id: NodeId) -> None:
        pass

    async def watch(self) -> AsyncIterator[Sighting]:
        while True:
            yield await self._seen.get()

    def look_again(self) -> None:
        self.was_looked_again.set()

    async def close(self) -> None:
        pass


def test_the_next_master_tells_the_platform_which_nodes_there_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without an agent that vanished between two masters would never be missed."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    roles = {WORKER: RoleSpec(nodes=2, relaunches=dict.fromkeys(ExitReason, 1))}
    spec = JobSpec(managed=True, roles=roles)
    platforms: list[PaperPlatform] = []

    def make_platform(known: Collection[NodeId]) -> PaperPlatform:
        platforms.append(PaperPlatform(known))
        return platforms[-1]

    async def one_master() -> None:
        desk = PaperDesk()
        serving = asyncio.create_task(serve(tmp_path, desk, spec, make_platform=make_platform))
        async with asyncio.timeout(WAIT_S):
            while not serving.done():
                view = await desk.views.get()
                phases = [row["phase"] for row in view["nodes"]]  # type: ignore[attr-defined]
                if phases == [Phase.RUNNING, Phase.RUNNING]:
                    break
            desk.handed_in.put_nowait(None)
            await serving

    asyncio.run(one_master())
    asyncio.run(one_master())
    assert [platform.known for platform in platforms] == [set(), {0, 1}]


def test_when_the_stream_of_a_node_breaks_its_platform_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A platform that hears of a lost machine only minutes later is asked about it at once."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    # The agent is gone without a farewell: at the end the master would wait for it.
    monkeypatch.setattr(farewell, "FAREWELL_S", 0.1)
    spec = JobSpec(max_nodes=1, managed=True, size_from_platform=True)

    async def scene() -> None:
        desk, platform = PaperDesk(), PaperPlatform(())
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        announced = address.set_result
        make = {"make_platform": lambda _: platform}
        serving = asyncio.create_task(serve(tmp_path, desk, spec, announced, **make))
        async with asyncio.timeout(WAIT_S):
            where, agent = await address, HollowAgent()
            while not (await desk.views.get())["nodes"]:
                pass  # Nobody may come before the node is ordered.
            token = read_token(tmp_path / "state" / "token")
            agent.use(await connect(where, agent, token))
            attach = m.Attach("key", RULES, nproc=1, host="h", store_port=1, node_id=0, node_rank=0)
            assert isinstance(await agent.ask(attach), m.Attached)
            assert not platform.was_looked_again.is_set()
            agent.hang_up()
            await platform.was_looked_again.wait()
            desk.handed_in.put_nowait(None)
            await serving

    asyncio.run(scene())


def test_an_order_that_fails_ends_the_master_and_the_next_one_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost without a word: the core waited for a node that nothing would start."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    spec = JobSpec(max_nodes=1, managed=True, size_from_platform=True)

    class BrokenPlatform(PaperPlatform):
        async def launch(self, order: Order) -> None:
            raise ValueError(f"node {order.node_id} cannot be ordered")

    async def scene() -> None:
        desk = PaperDesk()
        with pytest.raises(ValueError, match="node 0 cannot be ordered"):
            await asyncio.wait_for(
                serve(tmp_path, desk, spec, make_platform=BrokenPlatform), WAIT_S
            )
        serving = asyncio.create_task(serve(tmp_path, desk, spec, make_platform=PaperPlatform))
        async with asyncio.timeout(WAIT_S):
            while not any(
                row["phase"] == Phase.RUNNING
                for row in (await desk.views.get())["nodes"]  # type: ignore[attr-defined]
            ):
                pass
            desk.handed_in.put_nowait(None)
            await serving

    asyncio.run(scene())


def test_what_a_desk_is_not_told_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    class DeafDesk(PaperDesk):
        async def tell(self, kind: str, text: str) -> None:
            raise ValueError("the desk is deaf")

    async def scene() -> None:
        desk, said = DeafDesk(), Heard()
        serving = asyncio.create_task(serve(tmp_path, desk, said=said))
        async with asyncio.timeout(WAIT_S):
            await desk.views.get()
            desk.handed_in.put_nowait(None)
            assert await serving
        assert any("ValueError: the desk is deaf" in line for line in said)

    asyncio.run(scene())
