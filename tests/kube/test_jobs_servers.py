# SPDX-License-Identifier: Apache-2.0
"""A whole job with parameter servers, whose pods run no agent, in `make soak`.

Every run shows that the servers have addresses that stay (test_platform.py), and what is told to
their pods (tests/contract/kubernetes).
"""

from pathlib import Path

import pytest

from tests.kube.cluster import Cluster
from tests.kube.kubelet import missing
from tests.kube.pod_jobs import SCRIPTS, Field, elastic_job, field, worker

pytestmark = [
    pytest.mark.kube,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=f"no pods can run here: {missing()}"),
]


def test_a_job_with_parameter_servers_finds_a_server_again_that_was_replaced(
    cluster: Cluster, tmp_path: Path
) -> None:
    """No agent is in these pods: addresses that stay, and TF_CONFIG, are all they need."""
    with field(cluster, tmp_path, hosts=3) as there:
        command = ["python", str(SCRIPTS / "pod_roles.py")]
        template = worker(there.jobs.folder, command=command)
        job = elastic_job("servers", 2, template)
        job["spec"]["distributionStrategy"] = "ParameterServerStrategy"
        job["spec"]["replicaSpecs"]["ps"] = {"replicas": 2, "template": template}
        there.apply(job)
        # Of two workers one is the chief.
        asking = {("chief", "0"), ("worker", "0")}

        def wait_servers(without: str) -> set[str]:
            """Wait until all who ask have met two servers since, none of them this one."""
            seen = len(answers(there))

            def met() -> set[str]:
                pairs = {(role, index, server) for role, index, server in answers(there)[seen:]}
                servers = {server for *_, server in pairs} - {without}
                wanted = {(*who, server) for who in asking for server in servers}
                return servers if len(servers) == 2 and wanted <= pairs else set()

            found: set[str] = there.until(met, f"two servers without {without}")
            return found

        lost, stays = sorted(wait_servers(without=""))
        there.node.evict(lost)
        assert stays in wait_servers(without=lost)
        there.jobs.finish()
        there.wait_phase("servers", "Succeeded")


def answers(there: Field) -> list[list[str]]:
    """Who asked, and which server answered; whole lines only."""
    file = there.jobs.folder / "answers"
    text = file.read_text() if file.exists() else ""
    return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
