# SPDX-License-Identifier: Apache-2.0
"""What the operator sees, put together from several watches; and which of several acts."""

from holdfast.platforms.kubernetes.kinds import PODS
from holdfast.platforms.kubernetes.operator.leader import Lease, LeaseSpec, Take, Wait, decide
from holdfast.platforms.kubernetes.operator.sight import Sight
from holdfast.platforms.kubernetes.times import seconds_of, stamp
from tests.contract.kubernetes.sights import T0, manifest, master_pod


def test_jobs_of_one_name_in_two_namespaces_are_two_jobs() -> None:
    """The prior art counts by the job's name without its namespace."""
    sight = Sight()
    first, second = manifest(), manifest(uid="another")
    second["metadata"]["namespace"] = "other"
    sight.see_job(first)
    sight.see_job(second)
    sight.see_child(PODS, master_pod(0))
    here, there = sight.observed(("research", "mnist")), sight.observed(("other", "mnist"))
    assert here is not None
    assert there is not None
    assert len(here.pods) == 1
    assert not there.pods


def test_progress_alone_is_no_reason_to_look_at_a_job() -> None:
    """Hundreds of masters that write a step every second cost the operator next to nothing."""
    sight = Sight()
    assert sight.see_job(manifest(status={"phase": "Running", "step": 1})) is not None
    assert sight.see_job(manifest(status={"phase": "Running", "step": 2})) is None
    assert sight.see_job(manifest(status={"phase": "Succeeded", "step": 2})) is not None
    resumed = manifest(status={"phase": "Succeeded"})
    resumed["metadata"]["generation"] = 2
    assert sight.see_job(resumed) is not None
    assert sight.see_job(resumed, gone=True) is not None


def test_the_end_of_an_old_job_does_not_hide_the_new_one_of_its_name() -> None:
    sight = Sight()
    sight.see_job(manifest(uid="new"))
    sight.see_job(manifest(uid="old"), gone=True)
    seen = sight.observed(("research", "mnist"))
    assert seen is not None
    assert seen.job.uid == "new"


def test_an_answer_that_comes_late_does_not_bring_a_pod_back() -> None:
    sight = Sight()
    sight.see_job(manifest())
    pod = master_pod(0)
    sight.see_child(PODS, pod)
    sight.see_child(PODS, pod, gone=True)
    sight.hear_child(PODS, pod, "")
    seen = sight.observed(("research", "mnist"))
    assert seen is not None
    assert not seen.pods


def test_an_answer_does_not_hide_what_was_seen_since() -> None:
    sight = Sight()
    sight.see_job(manifest())
    newer = {**manifest(status={"phase": "Running"})}
    newer["metadata"] = {**newer["metadata"], "resourceVersion": "9"}
    sight.see_job(newer)
    sight.hear_job(manifest(status={"phase": "Pending"}), "7")
    seen = sight.observed(("research", "mnist"))
    assert seen is not None
    assert seen.status.phase == "Running"


# ---- leader election -----------------------------------------------------------------------------


def test_who_leads() -> None:
    other = Lease(spec=LeaseSpec(holder_identity="other", lease_duration_seconds=15))
    released = Lease(spec=LeaseSpec(holder_identity=""))
    mine = Lease(spec=LeaseSpec(holder_identity="me"))
    assert decide(None, "me", seen_at=0, now=100) == Take()
    assert decide(released, "me", seen_at=99, now=100) == Take()
    assert decide(mine, "me", seen_at=99, now=100) == Take()
    assert decide(other, "me", seen_at=99, now=100) == Wait(114)
    assert decide(other, "me", seen_at=99, now=114) == Take()


def test_the_clock_of_the_leader_s_machine_does_not_matter() -> None:
    """Only when the lease was seen to change counts, not the time that is written in it."""
    spec = LeaseSpec(holder_identity="other", renew_time="2001-01-01T00:00:00.000000Z")
    assert decide(Lease(spec=spec), "me", seen_at=99, now=100) == Wait(114)


def test_times_are_read_and_written_as_kubernetes_does() -> None:
    assert stamp(0) == "1970-01-01T00:00:00Z"
    assert seconds_of(stamp(T0)) == T0
    assert seconds_of("2026-11-16T10:30:00.5+00:00") is not None
    assert seconds_of("soon") is None
