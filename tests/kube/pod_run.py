# SPDX-License-Identifier: Apache-2.0
"""One pod of the fake kubelet, from the moment it has a host to its end, with its status."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from holdfast.platforms.kubernetes.api import (
    PODS,
    SECRETS,
    Api,
    Conflict,
    NotFound,
    Unavailable,
)
from tests.kube import pod_spec
from tests.kube.pod_container import Container, Design
from tests.kube.pod_network import GATEWAY, Network, Port
from tests.kube.pod_volumes import Volumes

PAUSE_S = 0.2
Result = TypeVar("Result")


class PodRun:
    """Runs the containers. What they do afterwards is never to start again (restartPolicy)."""

    def __init__(
        self,
        pod: dict[str, Any],
        *,
        api: Api,
        network: Network,
        volumes: Volumes,
        folder: Path,
        threads: Executor,
    ) -> None:
        self.pod = pod
        self.folder = folder
        self.port: Port | None = None
        self.is_running = False
        """Its containers run: Services may lead to it."""
        self.ready = asyncio.Event()
        """Set as soon as is_running was ever true, or never will be."""
        self._api, self._network, self._volumes = api, network, volumes
        self._threads = threads
        self._containers: dict[str, Container] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._status: dict[str, Any] = {"startTime": stamp()}
        self._wants_end = self._is_deleted()
        self._is_lost = False
        self._is_over = False

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def host(self) -> str:
        return str(self.pod["spec"]["nodeName"])

    @property
    def hosts(self) -> Path:
        return self.folder / "hosts"

    def log(self, container: str = "") -> str:
        """What its containers, or one of them, have printed so far."""
        names = [container] if container else list(self._containers)
        logs = [self._containers[name].log for name in names if name in self._containers]
        return "\n".join(log.read_text(errors="replace") for log in logs)

    async def live(self, services_for: Callable[["PodRun"], None]) -> None:
        """The whole life. `services_for` writes its hosts file once it has an address."""
        self.folder.mkdir(parents=True)
        try:
            self.port = await self._in_thread(self._network.plug)
            services_for(self)
            await self._run_containers()
        finally:
            self.is_running = False
            self._is_over = True
            self.ready.set()
            self._send(signal.SIGKILL)
        # Before anything else: somebody waits for the reason.
        await self._report()
        await self._in_thread(self.port.close)
        if self._is_deleted():
            await self._insist(self._delete)

    def changed(self, pod: dict[str, Any]) -> None:
        """The object is another now; if it is to go, its containers have the grace to end."""
        was_deleted, self.pod = self._is_deleted(), pod
        if self._is_deleted() and not was_deleted:
            self._wants_end = True
            self._send(signal.SIGTERM)
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 0)
            asyncio.get_running_loop().call_later(grace, self._send, signal.SIGKILL)

    def vanished(self) -> None:
        """The object is gone, by force: so must be the containers."""
        self.lose()

    def lose(self) -> None:
        """Its host is gone: nobody says anything any more."""
        self._is_lost = True
        self._wants_end = True
        self._send(signal.SIGKILL)

    def evict(self, message: str) -> None:
        self._status |= {"reason": "Evicted", "message": message}
        self._wants_end = True
        self._send(signal.SIGKILL)

    def kill(self, number: signal.Signals) -> None:
        """A signal to the first process of each container, from outside of Kubernetes."""
        self._send(number)

    # ---- containers -----------------------------------------------------------------------------

    async def _run_containers(self) -> None:
        for container in pod_spec.containers_of(self.pod):
            self._states[container["name"]] = {"waiting": {"reason": "ContainerCreating"}}
        await self._report()
        designs = await self._insist(self._designs, until_found=True)
        if designs is None:
            return
        for container in self.pod["spec"].get("initContainers", ()):
            if not await self._run(designs[container["name"]]):
                return
        mains = [designs[container["name"]] for container in self.pod["spec"]["containers"]]
        if self._wants_end:
            return
        ends = [asyncio.create_task(self._run(design)) for design in mains]
        self.is_running = True
        self.ready.set()
        await self._report()
        for end in asyncio.as_completed(ends):
            await end
            if not all(end.done() for end in ends):
                await self._report()

    async def _run(self, design: Design) -> bool:
        """One container to its end; whether that was a good one."""
        if self._wants_end:
            return False
        assert self.port is not None
        # Its processes are bound to this thread, which lasts.
        container = Container(design, self.folder / design.name, self.port.namespace.path)
        self._containers[design.name] = container
        began = stamp()
        self._states[design.name] = {"running": {"startedAt": began}}
        end = await self._in_thread(container.wait)
        self._states[design.name] = {
            "terminated": {
                "exitCode": end.exit_code,
                "reason": end.reason,
                "startedAt": began,
                "finishedAt": stamp(),
            }
        }
        return end.exit_code == 0

    async def _designs(self) -> dict[str, Design]:
        assert self.port is not None
        secrets = {}
        for name in pod_spec.secret_references(self.pod):
            for key, value in (await self._volumes.contents(SECRETS, name)).items():
                secrets[name, key] = value.decode()
        account = await self._volumes.account(self.pod, self.folder)
        volumes = await self._volumes.make(self.pod, self.folder)
        designs = {}
        for container in pod_spec.containers_of(self.pod):
            env = pod_spec.environment(
                self.pod,
                container,
                address=self.port.address,
                api_port=self._network.api_port,
                secrets=secrets,
            )
            designs[container["name"]] = pod_spec.design(
                self.pod, container, env=env, volumes=volumes, hosts=self.hosts, account=account
            )
        return designs

    def _send(self, number: signal.Signals) -> None:
        for name, container in self._containers.items():
            if "running" in self._states[name]:
                container.send(number)

    # ---- the object -----------------------------------------------------------------------------

    def _is_deleted(self) -> bool:
        return "deletionTimestamp" in self.pod["metadata"]

    async def _report(self) -> None:
        """Say how it is, as often as it takes."""
        body = {"metadata": {"uid": self.pod["metadata"]["uid"]}, "status": self._full_status()}
        await self._insist(
            lambda: self._api.patch(
                PODS, self.name, body, self.pod["metadata"]["namespace"], subresource="status"
            )
        )

    async def _delete(self) -> None:
        meta = self.pod["metadata"]
        await self._api.delete(PODS, self.name, meta["namespace"], uid=meta["uid"], grace_s=0)

    async def _insist(
        self, ask: Callable[[], Awaitable[Result]], *, until_found: bool = False
    ) -> Result | None:
        """Ask until there is an answer; None if the pod, or its host, is not there any more.

        With `until_found` it is about something that somebody may still make for the pod.
        """
        while not self._is_lost:
            try:
                return await ask()
            except (NotFound, Conflict):
                if not until_found or self._wants_end:
                    return None
            except Unavailable:
                pass
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), PAUSE_S)
        return None

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _full_status(self) -> dict[str, Any]:
        main = [container["name"] for container in self.pod["spec"]["containers"]]
        phase = self._phase(main)
        ready = "True" if phase == "Running" and self.is_running else "False"
        status = {
            **self._status,
            "phase": phase,
            "hostIP": GATEWAY,
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp()},
                {"type": "Ready", "status": ready, "lastTransitionTime": stamp()},
            ],
            "containerStatuses": _container_statuses(self.pod, main, self._states),
        }
        if init := [name for name in self._states if name not in main]:
            status["initContainerStatuses"] = _container_statuses(self.pod, init, self._states)
        if self.port is not None:
            status |= {"podIP": self.port.address, "podIPs": [{"ip": self.port.address}]}
        return status

    def _phase(self, main: list[str]) -> str:
        if self._status.get("reason") == "Evicted":
            return "Failed"
        ends = {
            name: state["terminated"]["exitCode"]
            for name, state in self._states.items()
            if "terminated" in state
        }
        if any(code for name, code in ends.items() if name not in main):
            return "Failed"
        if all(name in ends for name in main):
            return "Failed" if any(ends[name] for name in main) else "Succeeded"
        if self._is_over:
            return "Failed"
        return "Running" if self.is_running else "Pending"


def _container_statuses(
    pod: dict[str, Any], names: list[str], states: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    images: Mapping[str, str] = {
        container["name"]: container.get("image", "") for container in pod_spec.containers_of(pod)
    }
    return [
        {
            "name": name,
            "image": images[name],
            "imageID": "",
            "restartCount": 0,
            "ready": "running" in states[name],
            "started": "running" in states[name],
            "state": states[name],
        }
        for name in names
    ]


def stamp() -> str:
    """The time now as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
