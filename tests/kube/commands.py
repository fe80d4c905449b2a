# SPDX-License-Identifier: Apache-2.0
"""What the tests of `holdfast k8s` need: jobs and pods to look at, and the command as a process."""

import asyncio
import queue
import signal
import subprocess
import sys
import threading
from typing import IO, Any

from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.api import ELASTICJOBS, PODS, Api
from tests.kube.cluster import Cluster

WAIT_S = 60


def manifest(name: str = "job") -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "main", "image": "train"}]}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {"replicaSpecs": {"worker": {"replicas": 3, "template": template}}},
    }


def set_status(
    api: Api, runner: asyncio.Runner, namespace: str, status: dict[str, Any], name: str = "job"
) -> None:
    body = {"status": status}
    runner.run(api.patch(ELASTICJOBS, name, body, namespace, subresource="status"))


def make_pod(
    api: Api, runner: asyncio.Runner, namespace: str, uid: str, node_id: int, host: str = ""
) -> None:
    """The pod of worker 0 with this id, as the platform would make it."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"job-edljob-worker-{node_id}",
            "labels": {
                names.JOB_LABEL: "job",
                names.ROLE_LABEL: "worker",
                names.NODE_ID_LABEL: str(node_id),
                names.NODE_RANK_LABEL: "0",
                names.RELAUNCHES_LABEL: "0",
            },
            "ownerReferences": [names.owner_reference("job", uid)],
        },
        "spec": {
            "containers": [{"name": "main", "image": "train"}],
            **({"nodeName": host} if host else {}),
        },
    }
    runner.run(api.create(PODS, pod, namespace))


class Command:
    """`holdfast k8s` as a process, and the lines that it prints."""

    def __init__(self, cluster: Cluster, namespace: str, *words: str) -> None:
        where = [f"--kubeconfig={cluster.kubeconfig()}", f"--namespace={namespace}"]
        program = [sys.executable, "-m", "holdfast.cli", "k8s"]
        self._process = subprocess.Popen(
            [*program, *words, *where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._lines = _Lines(self._process.stdout)
        self._remarks = _Lines(self._process.stderr)

    def line(self) -> str:
        """The next one on standard output."""
        return self._lines.next()

    def remark(self) -> str:
        """The next one on standard error."""
        return self._remarks.next()

    def remarks(self) -> str:
        """All that is left on standard error, when it has ended."""
        return self._remarks.rest()

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        return self._process.wait(WAIT_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(WAIT_S)
        self._lines.rest()
        self._remarks.rest()


class _Lines:
    """A stream that is read by a thread, so that nobody waits for a line for ever."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._queue: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def next(self) -> str:
        return self._queue.get(timeout=WAIT_S)

    def rest(self) -> str:
        self._thread.join(WAIT_S)
        return "\n".join(self._queue.get_nowait() for _ in range(self._queue.qsize()))

    def _read(self) -> None:
        with self._stream as lines:
            for line in lines:
                self._queue.put(line.rstrip())
