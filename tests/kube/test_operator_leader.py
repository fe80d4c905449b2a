# SPDX-License-Identifier: Apache-2.0
"""Several operators on a real API server: exactly one acts."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.api import (
    ELASTICJOBS,
    LEASES,
    PODS,
    ROLE_BINDINGS,
    Api,
)
from holdfast.platforms.kubernetes.operator.health import Health
from holdfast.platforms.kubernetes.operator.leader import LEASE, Leadership
from holdfast.platforms.kubernetes.operator.process import Operator
from holdfast.runtime.http import HttpServer
from tests.kube.cluster import Cluster
from tests.kube.operator_scenes import (
    ACCOUNT,
    WAIT_S,
    Json,
    allow_operator,
    condition,
    manifest,
    master_of,
    seen,
)
from tests.waiting import until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(400)]


def test_of_two_operators_one_acts_and_the_other_takes_over_when_it_is_killed(
    cluster: Cluster, api: Api, namespace: str, tmp_path: Path, runner: asyncio.Runner
) -> None:
    user = runner.run(allow_operator(cluster, api, namespace))
    config = cluster.kubeconfig(impersonate=user)
    with ExitStack() as ends:
        started = [
            ends.enter_context(operator_process(config, namespace, tmp_path / f"{n}.log"))
            for n in range(2)
        ]

        async def is_led_by(which: list[Path]) -> Path:
            lease = await seen(
                api,
                LEASES,
                namespace,
                lambda obj: led_by(obj, which),
                f"one of {[path.name for path in which]} to lead",
            )
            found = led_by(lease, which)
            assert found is not None
            return found

        logs = {log: process for process, log in started}
        leader = runner.run(is_led_by(list(logs)))
        (other,) = set(logs) - {leader}
        wait_until_it_says(leader, "leads")
        wait_until_it_says(other, "stands by")
        runner.run(api.create(ELASTICJOBS, manifest("mnist"), namespace))
        runner.run(condition(api, namespace, "mnist", "MasterRunning", "False", "MasterPending"))
        assert "is made" not in other.read_text()

        logs[leader].send_signal(signal.SIGKILL)
        logs[leader].wait(WAIT_S)
        runner.run(api.delete(PODS, names.master_pod_name("mnist", 0), namespace))
        runner.run(master_of(api, namespace, "mnist", 1))
        assert runner.run(is_led_by([other])) == other
        wait_until_it_says(other, "leads")

        # One that is asked to end gives the lease back, so that nobody has to wait for its end.
        logs[other].send_signal(signal.SIGTERM)
        assert logs[other].wait(WAIT_S) == 0, other.read_text()
        lease = runner.run(api.get(LEASES, LEASE, namespace))
        assert lease["spec"].get("holderIdentity", "") == ""


@contextmanager
def operator_process(
    config: Path, namespace: str, log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    command = [
        *(sys.executable, "-m", "holdfast.cli", "operator"),
        *("--kubeconfig", str(config)),
        *("--namespace", namespace),
        *("--lease-namespace", namespace),
        *("--http", "127.0.0.1:0"),
    ]
    environ = {**os.environ, "PYTHONPATH": "src"}
    with open(log, "wb") as file:
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stderr=file)
    try:
        yield process, log
    finally:
        process.kill()
        process.wait(WAIT_S)
        print(log.read_text())  # Shown if the test fails.


def led_by(lease: Json, logs: list[Path]) -> Path | None:
    """Which of these operators says that it has the lease; None if none does yet."""
    holder = lease["spec"].get("holderIdentity", "")
    if not holder:
        return None
    until(lambda: any(holder in log.read_text() for log in logs), WAIT_S, f"{holder} to say so")
    return next(log for log in logs if holder in log.read_text())


def wait_until_it_says(log: Path, role: str) -> None:
    """Until the operator that writes this log is alive, ready, and in this role."""
    said = re.compile(r"answers /healthz and /readyz on (\S+)\n")
    address = until(lambda: said.search(log.read_text()), WAIT_S, "an address")[1]
    assert httpx.get(f"http://{address}/healthz", timeout=WAIT_S).json() == {"ok": True}

    def is_ready() -> bool:
        answer = httpx.get(f"http://{address}/readyz", timeout=WAIT_S)
        is_in_role = bool(answer.json()["role"] == role)
        return is_in_role and answer.status_code == 200

    until(is_ready, WAIT_S, f"an operator that is ready and {role}")


def test_an_operator_is_ready_when_it_has_the_lease_and_has_listed_all_that_it_looks_after(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        user = f"system:serviceaccount:{namespace}:{ACCOUNT}"
        of_operator = Api(cluster.access(impersonate=user))
        leadership = Leadership(api, namespace, "me", say=print)
        health = Health(leadership)
        http = await HttpServer.start("127.0.0.1:0", health.application())

        async def act() -> None:
            health.operator = Operator(of_operator, namespaces=[namespace], say=print)
            await health.operator.run()

        async def answer(code: int, waits_for: str) -> None:
            def is_so() -> bool:
                answer = httpx.get(f"http://{http.address}/readyz", timeout=WAIT_S)
                waits = " ".join(answer.json()["waits for"])
                return (
                    answer.status_code == code
                    and waits_for in waits
                    and bool(waits) == (code != 200)
                )

            await asyncio.to_thread(until, is_so, WAIT_S, f"{code} {waits_for}")

        await answer(503, "the lease")
        holding = asyncio.create_task(leadership.hold(act))
        # It leads, but has no rights yet.
        await answer(503, f"elasticjobs in {namespace}")
        await allow_operator(cluster, api, namespace)
        await answer(200, "")
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await http.close()
        await of_operator.close()

    runner.run(scene())


def test_a_leader_that_cannot_renew_its_lease_stops_before_another_begins(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        history: list[str] = []
        begun = {"first": asyncio.Event(), "second": asyncio.Event()}

        def candidate(me: str, client: Api) -> "asyncio.Task[None]":
            async def act() -> None:
                history.append(f"{me} begins")
                begun[me].set()
                try:
                    await asyncio.Event().wait()
                finally:
                    history.append(f"{me} ends")

            leadership = Leadership(client, namespace, me, say=lambda text: None, lease_s=3.0)
            return asyncio.create_task(leadership.hold(act))

        of_first = Api(cluster.access(impersonate=user))
        first = candidate("first", of_first)
        async with asyncio.timeout(WAIT_S):
            await begun["first"].wait()
        second = candidate("second", api)
        # From now on the API server answers the first one with refusals only.
        await api.delete(ROLE_BINDINGS, "holdfast-operator-leader", namespace)
        async with asyncio.timeout(WAIT_S):
            await begun["second"].wait()
        # Whoever else has led meanwhile: never two at once.
        assert all(entry.endswith(" ends") for entry in history[1::2])
        assert history[-2:] == ["first ends", "second begins"]
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await of_first.close()

    runner.run(scene())
