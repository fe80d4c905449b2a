# SPDX-License-Identifier: Apache-2.0
"""One value of every record of nodes without agents."""

from holdfast.core.job import records as rec
from holdfast.core.kernel import Record

ROLE_RECORDS: list[Record] = [
    rec.RoleRankSet(role="ps", node_rank=0, is_wanted=True),
    rec.RoleRankSet(role="worker", node_rank=3, is_wanted=False, is_given_up=True),
    rec.RolesSet(),
    rec.RoleNodePlanned(
        node_id=4,
        role="ps",
        node_rank=0,
        relaunches=1,
        memory_mib=2048,
        cpu_milli=500,
        at_s=1.5,
        down_since_s=1.25,
    ),
    rec.RoleNodeChanged(node_id=4, phase="running", machine="m1", message="runs", leaves=True),
    rec.RoleRelaunched(role="ps", node_rank=0, reason="oom"),
    rec.RoleAsked(role="ps", memory_mib=4096, cpu_milli=1000),
    rec.RolePlanSettled(plan_id="p1", ok=False, text="there is no node 7 of role ps"),
    rec.RolesSet(is_suspended=True, next_node_id=9),
]
