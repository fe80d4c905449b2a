# SPDX-License-Identifier: Apache-2.0
"""The desk against a real API server: plans in their order, status and Events that people read."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.job.events import PlanAsked
from holdfast.model.job import JobSpec
from holdfast.model.order import Plan
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.beginning import own_job
from holdfast.platforms.kubernetes.desk import KubernetesDesk
from holdfast.platforms.kubernetes.kinds import ELASTICJOBS, EVENTS, SCALEPLANS
from holdfast.platforms.kubernetes.manifest import read_job
from holdfast.platforms.kubernetes.news import EVENTS_AT_ONCE
from holdfast.platforms.kubernetes.spec import job_spec
from holdfast.platforms.kubernetes.watching import Seen, follow
from tests.core.harness import Job, settled
from tests.hearing import Heard
from tests.kube.cluster import Cluster, OwnCluster

pytestmark = pytest.mark.kube

WAIT_S = 120.0
KUBECTL = Path(__file__).parents[2] / ".venv/bin/kubectl"


def manifest(replicas: int = 3) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "main", "image": "i"}]}}
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "j"},
        "spec": {"replicaSpecs": {"worker": {"replicas": replicas, "template": template}}},
    }


def scale_plan(name: str, replicas: int, job: str = "j") -> dict[str, Any]:
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ScalePlan",
        "metadata": {"name": name, "labels": {"scale-type": "manual"}},
        "spec": {"ownerJob": job, "replicaResourceSpecs": {"worker": {"replicas": replicas}}},
    }


def view(**changes: Any) -> dict[str, Any]:
    return {
        "job": "j",
        "state": "running",
        "wanted": {"nodes": 3, "suspended": False},
        "world": {"round": 1, "state": "running", "nodes": [0, 1, 2], "world_size": 3},
        "nodes": [{"node_id": n, "node_rank": n, "phase": "running"} for n in range(3)],
        "progress": {"step": 7, "goodput": 0.5},
        **changes,
    }


class Reader:
    """A desk with somebody who takes its plans."""

    def __init__(self, desk: KubernetesDesk, said: Heard) -> None:
        self.desk = desk
        self.said = said
        self.unanswered: list[str] = []
        self._plans = desk.plans()

    async def next(self) -> Plan:
        async with asyncio.timeout(WAIT_S):
            return await anext(self._plans)

    async def told(self, *, ok: bool = True, text: str = "done") -> Plan:
        """The next plan, which is answered like this."""
        plan = await self.next()
        await self.desk.answer(plan.plan_id, ok=ok, text=text)
        return plan

    async def ended(self) -> bool:
        async with asyncio.timeout(WAIT_S):
            return await anext(self._plans, None) is None

    async def close(self) -> None:
        await self._plans.aclose()  # type: ignore[attr-defined]
        await self.desk.close()


@asynccontextmanager
async def desk(api: Api, namespace: str) -> AsyncIterator[Reader]:
    """A desk as a master that starts now makes it."""
    obj = await api.get(ELASTICJOBS, "j", namespace)
    job, _ = read_job(obj)
    said = Heard()
    made = KubernetesDesk(api, job, obj.get("status") or {}, say=said)
    reader = Reader(made, said)
    try:
        yield reader
    finally:
        await reader.close()


async def changed(
    api: Api, kind: Any, name: str, namespace: str, is_so: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """The object, once it is so."""
    own = f"metadata.name={name}"
    following = follow(api, kind, namespace, fields=own)
    async with asyncio.timeout(WAIT_S), aclosing(following) as changes:
        async for seen in changes:
            if isinstance(seen, Seen) and is_so(seen.obj):
                return seen.obj
    raise AssertionError("follow never ends")


def kubectl(cluster: Cluster, namespace: str, *words: str) -> str:
    """What it printed."""
    command = [str(KUBECTL), f"--kubeconfig={cluster.kubeconfig()}", "-n", namespace, *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_S)
    return done.stdout


def phase_is(word: str) -> Callable[[dict[str, Any]], bool]:
    return lambda seen: bool(seen.get("status", {}).get("phase") == word)


def observes(generation: int) -> Callable[[dict[str, Any]], bool]:
    """Whether the status says that the job follows the spec of this generation."""
    return lambda seen: bool(
        seen.get("status", {}).get("observed", {}).get("generation") == generation
    )


def test_scale_plans_come_in_their_order_and_once_across_a_restart(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        await api.create(ELASTICJOBS, manifest(), namespace)
        # By name they would come the other way round.
        made = [await api.create(SCALEPLANS, scale_plan("b", 4), namespace)]
        made.append(await api.create(SCALEPLANS, scale_plan("a", 5), namespace))
        await api.create(SCALEPLANS, scale_plan("other", 9, job="another"), namespace)
        async with desk(api, namespace) as first:
            plans = [await first.next() for _ in range(4)]
            spec = [plan for plan in plans if plan.plan_id.startswith("spec-")]
            scaling = [plan for plan in plans if plan not in spec]
            assert [(plan.nodes, plan.suspend) for plan in spec] == [(3, None), (None, False)]
            assert sorted(plan.nodes or 0 for plan in scaling) == [4, 5]
            # The time of an object has whole seconds: then the name decides.
            times = [one["metadata"]["creationTimestamp"] for one in made]
            expected = [4, 5] if times[0] < times[1] else [5, 4]
            assert [plan.nodes for plan in scaling] == expected
            four = next(plan for plan in scaling if plan.nodes == 4)
            await first.desk.answer(four.plan_id, ok=True, text="4 nodes are wanted")
            for plan in spec:
                await first.desk.answer(plan.plan_id, ok=True, text="as it is")
            await first.desk.show(view())
        done = await api.get(SCALEPLANS, "b", namespace)
        assert (done["status"]["phase"], done["status"]["message"]) == (
            "Succeeded",
            "4 nodes are wanted",
        )
        assert done["status"]["finishTime"]
        async with desk(api, namespace) as second:
            left = await second.next()
            assert left.nodes == 5
            await second.desk.answer(left.plan_id, ok=False, text="too many")
            await api.create(SCALEPLANS, scale_plan("c", 6), namespace)
            assert (await second.next()).nodes == 6
        refused = await api.get(SCALEPLANS, "a", namespace)
        assert (refused["status"]["phase"], refused["status"]["message"]) == ("Failed", "too many")
        told = {
            (one["reason"], one["message"]) for one in (await api.list(EVENTS, namespace)).items
        }
        assert told == {
            ("PlanDone", "ScalePlan b is done: 4 nodes are wanted"),
            ("PlanRefused", "ScalePlan a is refused: too many"),
        }

    runner.run(scene())


def test_of_a_changed_spec_only_the_change_is_told(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """A suspension must not take back what a ScalePlan did, also not after a restart."""

    async def scene() -> None:
        await api.create(ELASTICJOBS, manifest(), namespace)
        async with desk(api, namespace) as first:
            begin = [await first.told(text=""), await first.told(text="")]
            assert [(plan.nodes, plan.suspend) for plan in begin] == [(3, None), (None, False)]
            await first.desk.show(view())
            await changed(api, ELASTICJOBS, "j", namespace, observes(1))
            await api.patch(ELASTICJOBS, "j", {"spec": {"suspend": True}}, namespace)
            plan = await first.next()
            assert (plan.plan_id, plan.nodes, plan.suspend) == ("spec-2", None, True)
        # The answer was lost with that master: the next one is told the same.
        worker = {"replicaSpecs": {"worker": {"replicas": 5}}}
        await api.patch(ELASTICJOBS, "j", {"spec": worker}, namespace)
        async with desk(api, namespace) as second:
            both = [await second.told(), await second.told()]
            assert [(plan.plan_id, plan.nodes, plan.suspend) for plan in both] == [
                ("spec-3", None, True),
                ("spec-3/worker", 5, None),
            ]
            await second.desk.show(view())
        async with desk(api, namespace) as third:
            await api.patch(ELASTICJOBS, "j", {"spec": {"suspend": False}}, namespace)
            resumed = await third.next()
            assert (resumed.plan_id, resumed.nodes, resumed.suspend) == ("spec-4", None, False)

    runner.run(scene())


def test_what_is_taken_back_before_it_is_answered_is_taken_back(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """Without it the spec would say false, and the job be suspended until the next edit."""

    async def suspend(is_so: bool) -> None:
        await api.patch(ELASTICJOBS, "j", {"spec": {"suspend": is_so}}, namespace)

    async def scene() -> None:
        await api.create(ELASTICJOBS, manifest(), namespace)
        async with desk(api, namespace) as first:
            await first.desk.show(view())
            await first.told()
            await first.told()
            await suspend(True)
            asked = await first.next()
            assert (asked.plan_id, asked.suspend) == ("spec-2", True)
            await suspend(False)
            # It is made after that edit: by the time it is told, the desk should know of both.
            await api.create(SCALEPLANS, scale_plan("p", 4), namespace)
            assert (await first.next()).nodes == 4
            await first.desk.answer("spec-2", ok=True, text="the job is suspended")
            back = await first.next()
            assert (back.plan_id, back.suspend) == ("spec-3", False)

    runner.run(scene())


def test_a_master_asks_again_whether_the_job_is_suspended_if_it_cannot_know(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """The one before it suspended the job and died before it could write that down."""

    async def scene() -> None:
        await api.create(ELASTICJOBS, manifest(), namespace)
        async with desk(api, namespace) as first:
            await first.desk.show(view())
            await first.told()
            await first.told()
            await changed(api, ELASTICJOBS, "j", namespace, observes(1))
            await api.patch(ELASTICJOBS, "j", {"spec": {"suspend": True}}, namespace)
            assert (await first.next()).suspend is True
        await api.patch(ELASTICJOBS, "j", {"spec": {"suspend": False}}, namespace)
        async with desk(api, namespace) as second:
            await second.desk.show(view())
            resumed = await second.told()
            assert (resumed.plan_id, resumed.nodes, resumed.suspend) == ("spec-3", None, False)
            await changed(api, ELASTICJOBS, "j", namespace, observes(3))
        # Its successor knows, and asks nothing: the first that comes is the next edit's.
        async with desk(api, namespace) as third:
            worker = {"replicaSpecs": {"worker": {"replicas": 5}}}
            await api.patch(ELASTICJOBS, "j", {"spec": worker}, namespace)
            assert (await third.next()).plan_id == "spec-4/worker"

    runner.run(scene())


def test_a_malformed_change_is_no_plan(api: Api, namespace: str, runner: asyncio.Runner) -> None:
    async def scene() -> None:
        await api.create(ELASTICJOBS, manifest(), namespace)
        async with desk(api, namespace) as reader:
            await reader.told()
            await reader.told()
            await api.patch(ELASTICJOBS, "j", {"spec": {"replicaSpec": {}}}, namespace)
            fixed = {"replicaSpec": None, "suspend": True}
            await api.patch(ELASTICJOBS, "j", {"spec": fixed}, namespace)
            assert (await reader.next()).plan_id == "spec-3"
            assert any("spec.replicaSpec: unknown field" in line for line in reader.said)
            await api.create(
                SCALEPLANS, {**scale_plan("p", 2), "spec": {"ownerJob": "j"}}, namespace
            )
            failed = await changed(api, SCALEPLANS, "p", namespace, phase_is("Failed"))
            assert "changes nothing" in failed["status"]["message"]

    runner.run(scene())


def test_nobody_gets_more_than_the_limits_of_the_job(
    api: Api, cluster: Cluster, namespace: str, runner: asyncio.Runner
) -> None:
    """In the prior art a size that somebody asks for goes over `resourceLimits` without a word."""
    over = "all nodes together would ask for 40 GPUs, more than 32 GPUs"

    async def told(reader: Reader, job: Job) -> tuple[bool, str]:
        """The job's answer to the next plan."""
        plan = await reader.next()
        ok, text = settled(job.feed(PlanAsked(plan)))
        await reader.desk.answer(plan.plan_id, ok=ok, text=text)
        return ok, text

    async def limit(gpus: int) -> None:
        limits = {"resourceLimits": {"gpu": gpus}}
        await api.patch(ELASTICJOBS, "j", {"spec": limits}, namespace)

    async def scene() -> None:
        body = manifest()
        (container,) = body["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"]
        container["resources"] = {"limits": {"nvidia.com/gpu": 8}}
        body["spec"]["resourceLimits"] = {"gpu": 32}
        written = await api.create(ELASTICJOBS, body, namespace)
        job = Job(job_spec(read_job(written)[0], JobSpec()))
        async with desk(api, namespace) as reader:
            await reader.desk.show(view())
            assert (await told(reader, job))[0]
            assert (await told(reader, job))[0]
            await api.create(SCALEPLANS, scale_plan("five", 5), namespace)
            assert await told(reader, job) == (False, over)
            failed = await changed(api, SCALEPLANS, "five", namespace, phase_is("Failed"))
            assert failed["status"]["message"] == over
            words = ("scale", "ej/j", "--replicas=5")
            await asyncio.to_thread(kubectl, cluster, namespace, *words)
            assert await told(reader, job) == (False, over)
            # A master that is started now goes on with the size that the job has.
            assert (await own_job(api, "j", namespace, reader.said))[0].name == "j"
            # What was refused for the limits is asked again with other ones, once.
            await limit(40)
            assert (await told(reader, job))[0]
            assert await told(reader, job) == (True, "the job has 5 nodes now, 3 before")
            await limit(48)
            assert (await told(reader, job)) == (True, "the job has other limits from now on")
            await api.patch(ELASTICJOBS, "j", {"spec": {"suspend": True}}, namespace)
            assert await told(reader, job) == (True, "the job is suspended")
        found = (await api.list(EVENTS, namespace)).items
        refused = {one["message"] for one in found if one["reason"] == "PlanRefused"}
        assert refused == {
            f"ScalePlan five is refused: {over}",
            f"the changed spec is refused: {over}",
        }

    runner.run(scene())


def test_a_refused_size_is_asked_again_when_the_job_is_suspended(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """Also by the next master; without it the spec would say 4 and the job have 2 for ever."""

    async def servers(count: int) -> None:
        roles = {"replicaSpecs": {"ps": {"replicas": count}}}
        await api.patch(ELASTICJOBS, "j", {"spec": roles}, namespace)

    async def suspend(is_so: bool) -> None:
        await api.patch(ELASTICJOBS, "j", {"spec": {"suspend": is_so}}, namespace)

    async def scene() -> None:
        body = manifest()
        roles = body["spec"]["replicaSpecs"]
        roles["ps"] = {**roles["worker"], "replicas": 2}
        await api.create(ELASTICJOBS, body, namespace)
        async with desk(api, namespace) as first:
            await first.desk.show(view())
            await first.told()
            await first.told()
            await servers(4)
            assert (await first.told(ok=False, text="not while it runs")).nodes == 4
        async with desk(api, namespace) as second:
            await second.desk.show(view())
            await suspend(True)
            assert (await second.told()).suspend is True
            again = await second.told()
            assert (again.role, again.nodes) == ("ps", 4)
            await suspend(False)
            # It was done: nothing is left to be asked again.
            assert (await second.told()).suspend is False
            await suspend(True)
            assert (await second.told()).suspend is True
            await servers(6)
            assert (await second.told()).nodes == 6

    runner.run(scene())


def test_fields_of_a_plan_without_effect_are_told_in_its_status(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        await api.create(ELASTICJOBS, manifest(), namespace)
        plan = scale_plan("p", 4)
        plan["spec"]["psHosts"] = ["ps-0:2222"]
        await api.create(SCALEPLANS, plan, namespace)
        async with desk(api, namespace) as reader:
            for _ in range(3):
                await reader.told()
            done = await changed(api, SCALEPLANS, "p", namespace, phase_is("Succeeded"))
        assert done["status"]["message"] == (
            "done; note: spec.psHosts: is not used: the master knows its parameter servers' "
            "addresses"
        )

    runner.run(scene())


def test_a_plan_for_two_roles_has_one_answer(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        body = manifest()
        roles = body["spec"]["replicaSpecs"]
        roles["ps"] = {**roles["worker"], "replicas": 2}
        written = await api.create(ELASTICJOBS, body, namespace)
        job = Job(job_spec(read_job(written)[0], JobSpec()))
        plan = scale_plan("p", 8)
        plan["spec"]["replicaResourceSpecs"]["ps"] = {"replicas": 4}
        async with desk(api, namespace) as reader:
            for _ in range(2):
                await reader.told()
            await api.create(SCALEPLANS, plan, namespace)
            asked = await reader.next()
            ok, text = settled(job.feed(PlanAsked(asked)))
            await reader.desk.answer(asked.plan_id, ok=ok, text=text)
            failed = await changed(api, SCALEPLANS, "p", namespace, phase_is("Failed"))
            assert failed["status"]["message"].startswith("the number of ps nodes cannot change")
        wanted: Any = job.machines.view(job.now)["wanted"]
        assert wanted["roles"] == {"ps": 2, "worker": 2, "chief": 1}

    runner.run(scene())


def test_the_plans_end_with_the_job(api: Api, namespace: str, runner: asyncio.Runner) -> None:
    async def scene() -> None:
        await api.create(ELASTICJOBS, manifest(), namespace)
        async with desk(api, namespace) as reader:
            await reader.told()
            await reader.told()
            await api.delete(ELASTICJOBS, "j", namespace)
            assert await reader.ended()
            # Nothing of the old job is written into the new one.
            await api.create(ELASTICJOBS, manifest(), namespace)
            await reader.desk.show(view())
        assert "phase" not in (await api.get(ELASTICJOBS, "j", namespace)).get("status", {})

    runner.run(scene())


def test_people_see_status_and_events(
    api: Api, cluster: Cluster, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        await api.create(ELASTICJOBS, manifest(), namespace)
        async with desk(api, namespace) as reader:
            await reader.desk.tell("WorldFormed", "round 1: 3 nodes, 3 workers (the job starts)")
            for _ in range(2):
                await reader.desk.tell("NodeLost", "node rank 2 is lost: its pod was evicted")
            await reader.desk.tell("SavesFailed", "node rank 1 could not make 2 saves")
            await reader.desk.tell("NodeReady", "is in the log, and no Event")
            await reader.desk.show(view())

    runner.run(scene())
    told = kubectl(cluster, namespace, "describe", "elasticjob", "j")
    assert "round 1: 3 nodes, 3 workers (the job starts)" in told
    assert "node rank 2 is lost: its pod was evicted" in told
    assert "x2 over" in told
    assert [line for line in told.splitlines() if "Warning  SavesFailed" in line]
    assert "node rank 1 could not make 2 saves" in told
    assert "is in the log" not in told
    row = kubectl(cluster, namespace, "get", "elasticjob", "j").splitlines()[1]
    assert "Running" in row
    assert "round 1 trains on 3 nodes with 3 workers" in told


def test_a_thousand_events_are_not_a_thousand(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        await api.create(ELASTICJOBS, manifest(), namespace)
        async with desk(api, namespace) as reader:
            for rank in range(1000):
                await reader.desk.tell("NodeLost", f"node rank {rank} is lost")
            await reader.desk.tell("JobFailed", "the job failed: too many were lost")
        found = (await api.list(EVENTS, namespace)).items
        assert EVENTS_AT_ONCE < len(found) < 100
        (end,) = [one for one in found if one["reason"] == "JobFailed"]
        assert end["type"] == "Warning"
        assert "more Events were left out" in end["message"]

    runner.run(scene())


def test_an_outage_holds_nothing_up_and_loses_nothing(
    private_cluster: Callable[..., OwnCluster], runner: asyncio.Runner
) -> None:
    own = private_cluster()
    namespace = own.new_namespace()
    api = Api(own.access())
    troubles: asyncio.Queue[str] = asyncio.Queue()
    stack = AsyncExitStack()

    async def before() -> Reader:
        await api.create(ELASTICJOBS, manifest(), namespace)
        await api.create(SCALEPLANS, scale_plan("p", 4), namespace)
        reader = await stack.enter_async_context(desk(api, namespace))
        plans = [await reader.next() for _ in range(3)]
        # What is written meets the outage, and is not simply done before it.
        reader.unanswered = [plan.plan_id for plan in plans]
        return reader

    async def during(reader: Reader) -> asyncio.Task[Any]:
        for plan_id in reader.unanswered:
            await reader.desk.answer(plan_id, ok=True, text="done")
        for step in range(50):
            await reader.desk.show(view(progress={"step": step, "goodput": 0.5}))
        await reader.desk.tell("WorldFormed", "round 1")
        # A master that starts now waits as well.
        starting = asyncio.create_task(own_job(api, "j", namespace, troubles.put_nowait))
        async with asyncio.timeout(WAIT_S):
            assert "trying again until it answers" in await troubles.get()
        return starting

    async def after(reader: Reader, starting: asyncio.Task[Any]) -> None:
        await changed(api, SCALEPLANS, "p", namespace, phase_is("Succeeded"))
        newest = await changed(api, ELASTICJOBS, "j", namespace, phase_is("Running"))
        assert newest["status"]["step"] == 49
        await api.create(SCALEPLANS, scale_plan("q", 5), namespace)
        assert (await reader.next()).nodes == 5
        async with asyncio.timeout(WAIT_S):
            job, _ = await starting
        assert job.name == "j"
        await stack.aclose()
        told = [one["reason"] for one in (await api.list(EVENTS, namespace)).items]
        assert sorted(told) == ["PlanDone", "WorldFormed"]
        # A server that comes up may fail once or twice more; it is not said at every try.
        assert 1 <= sum("waits until it answers" in line for line in reader.said) <= 4
        await api.close()

    reader = runner.run(before())
    own.stop_api_server()
    starting = runner.run(during(reader))
    own.start_api_server()
    runner.run(after(reader, starting))
