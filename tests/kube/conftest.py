# SPDX-License-Identifier: Apache-2.0
"""The API server that the tests in this folder speak to; they skip where there is none."""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.platforms.kubernetes.api import Api
from tests.kube.cluster import Cluster, OwnCluster, missing, own_cluster
from tests.kube.commands import Command
from tests.kube.keeper import shared_cluster

LIMIT_S = 600.0
"""For one test, with the start of a cluster on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("kube") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The one of the whole run: it is not to be stopped."""
    if reason := missing():
        pytest.skip(reason)
    with shared_cluster() as cluster:
        yield cluster


@pytest.fixture
def namespace(cluster: Cluster) -> str:
    """A namespace of this test alone."""
    return cluster.new_namespace()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """Runs the test's coroutines, all in one loop: `runner.run(...)`."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def api(cluster: Cluster, runner: asyncio.Runner) -> Iterator[Api]:
    """A client of the shared cluster as its administrator, to be used in `runner`."""
    api = Api(cluster.access())
    yield api
    runner.run(api.close())


@pytest.fixture
def private_cluster(tmp_path: Path) -> Iterator[Callable[..., OwnCluster]]:
    """Makes clusters of the test's own, whose servers it may stop: `(controllers, watch_cache)`."""
    if reason := missing():
        pytest.skip(reason)
    with ExitStack() as ends:

        def make(*, controllers: bool = False, watch_cache: bool = True) -> OwnCluster:
            folder = tmp_path / f"cluster-{secrets.token_hex(4)}"
            folder.mkdir()
            made = own_cluster(folder, controllers=controllers, watch_cache=watch_cache)
            return ends.enter_context(made)

        yield make


@pytest.fixture
def k8s(cluster: Cluster, namespace: str) -> Callable[..., int]:
    """Runs `holdfast k8s` in this test's namespace; the answer is its exit code."""
    where = [f"--kubeconfig={cluster.kubeconfig()}", f"--namespace={namespace}"]

    def run(action: str, *words: str) -> int:
        return main(["k8s", action, *words, *where])

    return run


@pytest.fixture
def start_k8s(cluster: Cluster, namespace: str) -> Iterator[Callable[..., Command]]:
    """Starts `holdfast k8s` as a process that works in this test's namespace."""
    with ExitStack() as ends:

        def start(*words: str) -> Command:
            command = Command(cluster, namespace, *words)
            ends.callback(command.close)
            return command

        yield start
