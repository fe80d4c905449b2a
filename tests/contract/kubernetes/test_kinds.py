# SPDX-License-Identifier: Apache-2.0
"""The paths of objects, and that no name leads to another place."""

import pytest

from holdfast.model.errors import UsageError
from holdfast.platforms.kubernetes.kinds import ELASTICJOBS, NODES, PODS


def test_paths_of_core_and_grouped_kinds() -> None:
    assert PODS.path("team", "a", "log") == "/api/v1/namespaces/team/pods/a/log"
    assert PODS.path(None) == "/api/v1/pods"
    assert NODES.path("ignored", "host-1.example") == "/api/v1/nodes/host-1.example"
    jobs = "/apis/elastic.iml.github.io/v1alpha1/namespaces/team/elasticjobs"
    assert ELASTICJOBS.path("team") == jobs
    assert ELASTICJOBS.path("team", "x", "status") == f"{jobs}/x/status"


@pytest.mark.parametrize(
    "name", ["..", ".", "../pods/a", "a/log", "a?watch=1", "a%2Fb", "a\n", "#"]
)
def test_a_name_cannot_lead_elsewhere(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a name"):
        PODS.path("team", name)
    with pytest.raises(UsageError, match="cannot be a name"):
        PODS.path(name, "a")
