# SPDX-License-Identifier: Apache-2.0
"""From one spec of an ElasticJob to the next: which plans the change makes, and in which order."""

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.model.order import WORKER, Plan
from holdfast.model.resources import Limits

REFUSED = "refused"
"""The name in `status.observed` of the sizes, by role, that were asked for and refused."""


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Plan]:
    """The plans that `after` makes and `before` did not; all of them if `before` is empty.

    A refused size is asked for again when the possible reason is gone: the limits have changed, or
    the job is suspended. Each size is a separate plan: a refused size would take along everything
    in the same plan.
    """
    spec_id = f"spec-{after['generation']}"
    old, new = before.get("replicas", {}), after["replicas"]
    suspend = after["suspend"] if before.get("suspend") != after["suspend"] else None
    # If `before` has no limits, the master has just begun with the limits of `after`.
    has_other_limits = before.get("limits", after["limits"]) != after["limits"]
    refused: Mapping[str, int] = before.get(REFUSED, {})
    is_new_try = has_other_limits or suspend is True
    again = {role for role in refused if is_new_try and new.get(role) == refused[role]}
    limits, job, sizes = [], [], []
    if has_other_limits:
        limits.append(Plan(plan_id=f"{spec_id}/limits", limits=Limits(**after["limits"])))
    if suspend is not None:
        job.append(Plan(plan_id=spec_id, suspend=suspend))
    for role in new:
        # The workers' size is asked at the beginning too: it is 0 if the only worker is the chief.
        has_other_size = old.get(role, 0) != new[role] and (role in old or role == WORKER)
        if has_other_size or role in again:
            sizes.append(Plan(plan_id=f"{spec_id}/{role}", role=role, nodes=new[role]))
    # Changes that a running job does not allow come before it resumes, and after it has stopped.
    if suspend is False:
        return [*limits, *sizes, *job]
    return [*limits, *job, *sizes]


def still_refused(
    before: Mapping[str, Any], after: Mapping[str, Any], plans: Iterable[Plan]
) -> dict[str, int]:
    """The refused sizes that `after` still has. The answers decide about sizes in `plans`."""
    asked = {plan.role for plan in plans if plan.nodes is not None}
    refused: Mapping[str, int] = before.get(REFUSED, {})
    wanted = after["replicas"]
    return {
        role: nodes
        for role, nodes in refused.items()
        if role not in asked and wanted.get(role) == nodes
    }
