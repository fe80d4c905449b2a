# SPDX-License-Identifier: Apache-2.0
"""What the operator does for jobs, on a real API server."""

import asyncio
import base64
from collections.abc import Callable

import pytest

from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.api import (
    ELASTICJOBS,
    EVENTS,
    PODS,
    PVCS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Api,
)
from holdfast.platforms.kubernetes.times import stamp
from tests.kube.cluster import Cluster, OwnCluster
from tests.kube.operator_scenes import (
    Json,
    allow_operator,
    also_in,
    condition,
    exited,
    gone,
    manifest,
    master_of,
    node_pod,
    operating,
    runs,
    seen,
    set_status,
)

pytestmark = [pytest.mark.kube, pytest.mark.timeout(400)]


def test_a_job_gets_its_master_and_all_that_it_needs(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        async with operating(cluster, user, namespace):
            job = await api.create(ELASTICJOBS, manifest("mnist"), namespace)
            uid = job["metadata"]["uid"]
            pod = await master_of(api, namespace, "mnist", 0)
            await condition(api, namespace, "mnist", "MasterRunning", "False", "MasterPending")
            name = names.master_name("mnist")
            made = [
                await api.get(kind, name, namespace)
                for kind in (SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, SERVICES, PVCS)
            ]
            secret = await api.get(SECRETS, names.secret_name("mnist", uid), namespace)
            for obj in (*made, secret, pod):
                (owner,) = obj["metadata"]["ownerReferences"]
                assert owner["uid"] == uid
            assert set(secret["data"]) == {"token", "ca.crt", "tls.crt", "tls.key"}
            assert len(base64.b64decode(secret["data"]["token"])) == 64
            assert pod["spec"]["containers"][0]["image"] == "holdfast:test"

            await set_status(api, namespace, pod, runs())
            await condition(api, namespace, "mnist", "MasterRunning", "True")
            events = await api.list(EVENTS, namespace)
            told = {event["reason"]: event for event in events.items}
            assert told["MasterPending"]["involvedObject"]["uid"] == uid
            assert "elasticjob-mnist-dlrover-master-0" in told["MasterPending"]["message"]

    runner.run(scene())


def test_a_lost_master_is_made_again_under_a_new_number_and_the_secret_stays(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        async with operating(cluster, user, namespace):
            job = await api.create(ELASTICJOBS, manifest("mnist"), namespace)
            secret_name = names.secret_name("mnist", job["metadata"]["uid"])
            first = await master_of(api, namespace, "mnist", 0)
            token = (await api.get(SECRETS, secret_name, namespace))["data"]["token"]
            # Deleted.
            await api.delete(PODS, first["metadata"]["name"], namespace)
            second = await master_of(api, namespace, "mnist", 1)
            # Evicted.
            await set_status(api, namespace, second, {"phase": "Failed", "reason": "Evicted"})
            third = await master_of(api, namespace, "mnist", 2)
            # Killed, soon after the one before it: there is a pause of 2 s, and no harm in it.
            await set_status(api, namespace, third, exited(137))
            await master_of(api, namespace, "mnist", 3)
            assert (await api.get(SECRETS, secret_name, namespace))["data"]["token"] == token

            def is_told(event: Json) -> bool:
                return event["reason"] == "MasterLost" and "Evicted" in event["message"]

            await seen(api, EVENTS, namespace, is_told, "an Event about the eviction")

    runner.run(scene())


def test_a_deleted_secret_is_said_while_the_master_runs_and_when_it_is_made_again(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        async with operating(cluster, user, namespace):
            job = await api.create(ELASTICJOBS, manifest("mnist"), namespace)
            first = await master_of(api, namespace, "mnist", 0)
            secret_name = names.secret_name("mnist", job["metadata"]["uid"])
            await api.delete(SECRETS, secret_name, namespace)
            await set_status(api, namespace, first, runs())

            def says(*words: str) -> Callable[[Json], bool]:
                def is_told(event: Json) -> bool:
                    texts = (event["reason"], event["message"])
                    return texts[0] == "SecretLost" and all(word in texts[1] for word in words)

                return is_told

            cannot = says(secret_name, "cannot start without it")
            await seen(api, EVENTS, namespace, cannot, "an Event about the Secret")
            await api.delete(PODS, first["metadata"]["name"], namespace)
            await master_of(api, namespace, "mnist", 1)
            again = says(secret_name, "another token")
            await seen(api, EVENTS, namespace, again, "an Event about the new Secret")

    runner.run(scene())


def test_a_master_that_fails_by_itself_uses_up_its_restart_count(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """And then the nodes of the job, which nobody looks after any more, are stopped."""

    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        async with operating(cluster, user, namespace):
            body = manifest("mnist")
            body["spec"]["replicaSpecs"]["dlrover-master"] = {"restartCount": 1}
            job = await api.create(ELASTICJOBS, body, namespace)
            node = node_pod("mnist", job["metadata"]["uid"])
            await api.create(PODS, node, namespace)
            await api.create(PODS, node_pod("other", "another-job"), namespace)
            await set_status(api, namespace, await master_of(api, namespace, "mnist", 0), exited(1))
            await set_status(api, namespace, await master_of(api, namespace, "mnist", 1), exited(1))
            failed = await condition(api, namespace, "mnist", "Failed", "True", "MasterFailed")
            assert "its restartCount is 1" in failed["message"]
            assert "no luck" in failed["message"]
            assert (await api.get(ELASTICJOBS, "mnist", namespace))["status"]["phase"] == "Failed"
            await gone(api, PODS, node["metadata"]["name"], namespace)
            await api.get(PODS, "other-edljob-worker-0", namespace)

    runner.run(scene())


def test_a_malformed_job_starts_nothing_says_why_and_goes_on_when_it_is_mended(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        async with operating(cluster, user, namespace):
            body = manifest("mnist", ttlSecondAfterFinished=5)
            await api.create(ELASTICJOBS, body, namespace)
            malformed = await condition(api, namespace, "mnist", "Malformed", "True")
            assert "spec.ttlSecondAfterFinished: unknown field" in malformed["message"]
            assert "ttlSecondsAfterFinished" in malformed["message"]
            for kind in (PODS, SERVICES, SECRETS, PVCS, ROLES):
                found = await api.list(kind, namespace, labels=f"{names.JOB_LABEL}=mnist")
                assert not found.items
            mend = {"spec": {"ttlSecondAfterFinished": None}}
            await api.patch(ELASTICJOBS, "mnist", mend, namespace)
            await master_of(api, namespace, "mnist", 0)
            await condition(api, namespace, "mnist", "Malformed", "False")

    runner.run(scene())


def test_a_job_that_is_made_suspended_starts_when_it_is_resumed(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        async with operating(cluster, user, namespace):
            await api.create(ELASTICJOBS, manifest("mnist", suspend=True), namespace)
            await condition(api, namespace, "mnist", "Suspended", "True")
            assert not (await api.list(PODS, namespace)).items
            await api.patch(ELASTICJOBS, "mnist", {"spec": {"suspend": False}}, namespace)
            await master_of(api, namespace, "mnist", 0)

            def is_pending(obj: Json) -> bool:
                return bool(obj["status"]["phase"] == "Pending")

            job = await seen(api, ELASTICJOBS, namespace, is_pending, "the phase Pending")
            assert "Suspended" not in [one["type"] for one in job["status"]["conditions"]]

    runner.run(scene())


def test_a_finished_job_gets_no_new_master_and_goes_after_its_ttl(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """The master's own words about the end are not overwritten."""

    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        async with operating(cluster, user, namespace):
            await api.create(ELASTICJOBS, manifest("mnist"), namespace)
            pod = await master_of(api, namespace, "mnist", 0)
            await set_status(api, namespace, pod, runs())
            await condition(api, namespace, "mnist", "MasterRunning", "True")
            await say_the_end(api, namespace, "mnist", "Failed")
            await set_status(api, namespace, pod, exited(1))
            await condition(api, namespace, "mnist", "MasterRunning", "False", "Finished")
            await condition(api, namespace, "mnist", "Failed", "True", "OfTheMaster")
            assert len((await api.list(PODS, namespace)).items) == 1
            patch = {"spec": {"ttlSecondsAfterFinished": 1}}
            await api.patch(ELASTICJOBS, "mnist", patch, namespace)
            await gone(api, ELASTICJOBS, "mnist", namespace)

    runner.run(scene())


async def say_the_end(api: Api, namespace: str, job: str, phase: str) -> None:
    """What a master writes before it exits."""
    status = {
        "phase": phase,
        "completionTime": stamp(1_800_000_000 - 10**8),
        "conditions": [{"type": phase, "status": "True", "reason": "OfTheMaster"}],
    }
    body = {"apiVersion": names.API_VERSION, "kind": "ElasticJob", "status": status}
    body["metadata"] = {"name": job}
    manager = names.MASTER_MANAGER
    await api.apply(ELASTICJOBS, job, body, namespace, manager=manager, subresource="status")


def test_a_job_that_the_api_server_refuses_does_not_hold_up_the_others(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """A broken job must neither block the others nor end the operator."""

    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        async with operating(cluster, user, namespace):
            broken = manifest("broken")
            container = {"name": "main", "image": "m", "ports": [{"containerPort": 99_999}]}
            master = {"template": {"spec": {"containers": [container]}}}
            broken["spec"]["replicaSpecs"]["dlrover-master"] = master
            await api.create(ELASTICJOBS, broken, namespace)
            refused = await condition(api, namespace, "broken", "MasterRunning", "False", "Refused")
            assert "99999" in refused["message"]
            await api.create(ELASTICJOBS, manifest("sound"), namespace)
            await master_of(api, namespace, "sound", 0)
            container["ports"] = [{"containerPort": 9_999}]
            patch = {"spec": {"replicaSpecs": {"dlrover-master": master}}}
            await api.patch(ELASTICJOBS, "broken", patch, namespace)
            await master_of(api, namespace, "broken", 0)

    runner.run(scene())


def test_a_bug_met_with_one_job_is_told_and_tried_again_and_leaves_the_others_alone(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """What fails here is what the operator speaks with, and only about the job `broken`."""
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        is_about_broken = text == f"{namespace}/broken: its time after the end is over"
        if is_about_broken and said.count(text) <= 3:
            raise RuntimeError("no luck")

    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        await api.create(ELASTICJOBS, manifest("broken", ttlSecondsAfterFinished=1), namespace)
        await say_the_end(api, namespace, "broken", "Succeeded")
        async with operating(cluster, user, namespace, say=say):
            await api.create(ELASTICJOBS, manifest("sound"), namespace)
            await master_of(api, namespace, "sound", 0)
            event = await seen(
                api, EVENTS, namespace, lambda event: event["reason"] == "OperatorBug", "an Event"
            )
            await gone(api, ELASTICJOBS, "broken", namespace)
        assert event["involvedObject"]["name"] == "broken"
        assert event["type"] == "Warning"
        assert "RuntimeError: no luck" in event["message"]

    runner.run(scene())
    told = [text for text in said if "a bug in the operator; tried again" in text]
    assert all(text.startswith(f"{namespace}/broken: ") and "Traceback" in text for text in told)
    pauses_s = [float(text.split("tried again in ")[1].split()[0]) for text in told]
    assert len(pauses_s) == 3
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] > pauses_s[0]


def test_two_jobs_of_one_name_in_two_namespaces_do_not_touch_each_other(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """The prior art keeps counts by the job's name alone."""

    async def scene() -> None:
        other = cluster.new_namespace()
        user = await allow_operator(cluster, api, namespace)
        await also_in(cluster, api, other, namespace)
        async with operating(cluster, user, namespace, other):
            for where in (namespace, other):
                await api.create(ELASTICJOBS, manifest("mnist"), where)
            here = await master_of(api, namespace, "mnist", 0)
            there = await master_of(api, other, "mnist", 0)
            await set_status(api, other, there, runs())
            await condition(api, other, "mnist", "MasterRunning", "True")
            await api.delete(PODS, here["metadata"]["name"], namespace)
            await master_of(api, namespace, "mnist", 1)
            untouched = await api.get(ELASTICJOBS, "mnist", other)
            assert untouched["status"]["master"] == {"launches": 1, "errors": 0}
            assert len((await api.list(PODS, other)).items) == 1

    runner.run(scene())


# ---- the operator itself -------------------------------------------------------------------------


def test_an_operator_that_was_away_goes_on_where_the_last_one_was(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        async with operating(cluster, user, namespace):
            for name in ("lost", "kept"):
                await api.create(ELASTICJOBS, manifest(name), namespace)
                pod = await master_of(api, namespace, name, 0)
                await set_status(api, namespace, pod, runs())
                await condition(api, namespace, name, "MasterRunning", "True")
        await api.delete(PODS, names.master_pod_name("lost", 0), namespace)
        await api.delete(SERVICES, names.master_name("kept"), namespace)
        await api.create(ELASTICJOBS, manifest("new"), namespace)
        async with operating(cluster, user, namespace):
            await master_of(api, namespace, "lost", 1)
            await master_of(api, namespace, "new", 0)

            def is_there(service: Json) -> bool:
                return bool(service["metadata"]["name"] == names.master_name("kept"))

            await seen(api, SERVICES, namespace, is_there, "the Service")
            kept = await api.get(ELASTICJOBS, "kept", namespace)
            assert kept["status"]["master"] == {"launches": 1, "errors": 0}

    runner.run(scene())


def test_outages_deletion_and_a_new_job_of_the_same_name(
    private_cluster: Callable[..., OwnCluster], runner: asyncio.Runner
) -> None:
    """One operator for the whole cluster, and a garbage collector that does its part."""

    async def scene() -> None:
        cluster = private_cluster(controllers=True)
        namespace, other = cluster.new_namespace(), cluster.new_namespace()
        api = Api(cluster.access())
        user = await allow_operator(cluster, api, namespace, whole_cluster=True)
        async with operating(cluster, user, restarts=True):
            # Without a claim: those go only when another controller has released them.
            body = manifest("mnist", stateVolume={"emptyDir": {}})
            job = await api.create(ELASTICJOBS, body, other)
            await master_of(api, other, "mnist", 0)

            # Its Secret, Service, Role and pods go with a job, and do not come back.
            await api.delete(ELASTICJOBS, "mnist", other)
            await gone(api, PODS, names.master_pod_name("mnist", 0), other)
            again = await api.create(ELASTICJOBS, body, other)
            pod = await seen(api, PODS, other, is_of(again), "the new job's master")
            assert pod["metadata"]["name"] == names.master_pod_name("mnist", 0)
            await gone(api, SECRETS, names.secret_name("mnist", job["metadata"]["uid"]), other)
            for kind in (SERVICES, ROLES, ROLE_BINDINGS, SERVICE_ACCOUNTS, SECRETS):
                await seen(api, kind, other, is_of(again), f"the new job's {kind.plural}")

            cluster.stop_api_server()
            cluster.start_api_server()
            await api.delete(PODS, names.master_pod_name("mnist", 0), other)
            await master_of(api, other, "mnist", 1)
            await api.create(ELASTICJOBS, manifest("later"), namespace)
            await master_of(api, namespace, "later", 0)
        await api.close()

    runner.run(scene())


def is_of(job: Json) -> Callable[[Json], bool]:
    """Whether an object belongs to this job, and to no other."""
    uid = job["metadata"]["uid"]
    return lambda obj: [o["uid"] for o in obj["metadata"].get("ownerReferences", ())] == [uid]
