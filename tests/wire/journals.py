# SPDX-License-Identifier: Apache-2.0
"""The jobs whose journals were written by wave 1 and are kept beside this file."""

from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from holdfast.model.role import RoleSpec

LATER_S = 200.0
"""Job time after the last record: when the state is looked at."""

_THREE = dict.fromkeys(ExitReason, 3)

SPECS = {
    # Two parameter servers, a chief and two workers, all without agents.
    "servers": JobSpec(
        managed=True,
        roles={
            "ps": RoleSpec(
                nodes=2,
                relaunches=_THREE,
                ends_the_job=False,
                holds_variables=True,
                critical_others=3,
                node_memory_mib=4096,
            ),
            "chief": RoleSpec(nodes=1, relaunches=_THREE, critical_others=3),
            "worker": RoleSpec(nodes=2, relaunches=_THREE),
        },
    ),
    # Three nodes with agents, and an evaluator without.
    "mixed": JobSpec(
        managed=True,
        size_from_platform=True,
        max_nodes=3,
        silence_s=1e6,
        lease_s=1e6,
        roles={"evaluator": RoleSpec(nodes=1, relaunches=_THREE, ends_the_job=False)},
    ),
}
