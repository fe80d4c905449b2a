# SPDX-License-Identifier: Apache-2.0
"""What the operator decides: a job and what exists for it in, actions out. No cluster, no clock."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import pytest

from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.kinds import PODS, PVCS, SERVICES
from holdfast.platforms.kubernetes.operator import objects
from holdfast.platforms.kubernetes.operator import reconcile as rec
from holdfast.platforms.kubernetes.operator.observed import Child, MasterPod, observe
from holdfast.platforms.kubernetes.times import stamp
from tests.contract.kubernetes.sights import (
    T0,
    Json,
    children,
    ended,
    evicted,
    manifest,
    master_pod,
    see,
)

T = TypeVar("T")


def only(decision: rec.Decision, kind: type[T]) -> T:
    (found,) = [action for action in decision.actions if isinstance(action, kind)]
    return found


def has(decision: rec.Decision, *kinds: type) -> bool:
    return any(isinstance(action, kinds) for action in decision.actions)


def launched(decision: rec.Decision) -> Json:
    """The pod of the master that is made."""
    (body,) = [
        action.body
        for action in decision.actions
        if isinstance(action, rec.Create) and action.kind == PODS
    ]
    return body


def launches(decision: rec.Decision) -> bool:
    return any(isinstance(a, rec.Create) and a.kind == PODS for a in decision.actions)


def conditions(decision: rec.Decision) -> Mapping[str, Json]:
    written = only(decision, rec.WriteStatus).status["conditions"]
    return {condition["type"]: condition for condition in written}


def counted(launches: int, errors: int = 0, **status: Any) -> Json:
    return {"master": {"launches": launches, "errors": errors}, **status}


def settled(obj: Json, *pods: MasterPod) -> Json:
    """The same job after the operator has written what it had to say."""
    decision = rec.reconcile(see(obj, *pods), T0)
    written = [a.status for a in decision.actions if isinstance(a, rec.WriteStatus)]
    return {**obj, "status": {**obj["status"], **written[0]}} if written else obj


# ---- making the master ---------------------------------------------------------------------------


def test_a_new_job_gets_everything_and_its_first_master_last() -> None:
    decision = rec.reconcile(observe(manifest()), T0, default_image="holdfast:1")
    made = [a for a in decision.actions if isinstance(a, rec.Apply | rec.Create)]
    kinds = [action.kind.plural for action in made]
    assert kinds[-1] == "pods"
    assert set(kinds) == {
        "serviceaccounts",
        "roles",
        "rolebindings",
        "services",
        "persistentvolumeclaims",
        "pods",
    }
    assert has(decision, rec.CreateSecret)
    assert launched(decision)["metadata"]["name"] == "elasticjob-mnist-dlrover-master-0"
    status = only(decision, rec.WriteStatus).status
    assert status["master"] == {"launches": 1, "errors": 0}
    assert status["phase"] == "Pending"
    assert conditions(decision)["MasterRunning"]["reason"] == "MasterPending"
    assert conditions(decision)["Malformed"]["status"] == "False"


def test_a_job_whose_master_runs_needs_nothing_but_a_look_at_its_secret() -> None:
    """Nobody may watch Secrets, so one that is deleted makes no noise by itself."""
    obj = settled(manifest(status=counted(1)), master_pod(0))
    now = T0 + 100
    decision = rec.reconcile(see(obj, master_pod(0)), now)
    assert decision == rec.Decision((rec.CheckSecret(),), again_at=now + rec.SECRET_LOOK_S)


def test_the_same_sight_leads_to_the_same_decision() -> None:
    seen = see(manifest(status=counted(1)), master_pod(0, status=evicted()))
    assert rec.reconcile(seen, T0) == rec.reconcile(seen, T0)


@pytest.mark.parametrize("plural", ["services", "roles", "rolebindings", "serviceaccounts"])
def test_what_is_deleted_around_a_running_master_is_made_again(plural: str) -> None:
    obj = settled(manifest(status=counted(1)), master_pod(0))
    decision = rec.reconcile(see(obj, master_pod(0), without=[plural]), T0)
    assert only(decision, rec.Apply).kind.plural == plural
    assert not launches(decision)


def test_an_object_that_an_older_operator_made_otherwise_is_applied_again() -> None:
    obj = settled(manifest(status=counted(1)), master_pod(0))
    around = children(observe(obj))
    other = Child(
        metadata=msgspec.structs.replace(
            around["roles"].metadata, annotations={objects.DIGEST_ANNOTATION: "of-another-version"}
        )
    )
    seen = observe(obj, [master_pod(0)], {**around, "roles": other})
    assert only(rec.reconcile(seen, T0), rec.Apply).kind.plural == "roles"


def test_a_claim_that_is_there_is_never_touched() -> None:
    seen = see(manifest(status=counted(1)), master_pod(0), without=["services"])
    kinds = [a.kind for a in rec.reconcile(seen, T0).actions if isinstance(a, rec.Apply)]
    assert kinds == [SERVICES]
    without_claim = see(manifest(status=counted(1)), master_pod(0), without=[PVCS.plural])
    assert only(rec.reconcile(without_claim, T0), rec.Create).kind == PVCS


# ---- making it again -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "status", [evicted(), ended(137), ended(143), ended(1)], ids=["evicted", "kill", "term", "1"]
)
def test_a_lost_master_is_made_again_at_once_under_a_new_number(status: Json) -> None:
    """By default the prior art gives a master zero restarts: one failure ends its job."""
    pod = master_pod(0, status=status)
    decision = rec.reconcile(see(manifest(status=counted(1)), pod), T0)
    assert launched(decision)["metadata"]["name"] == "elasticjob-mnist-dlrover-master-1"
    assert has(decision, rec.Confirm)
    told = {action.reason: action for action in decision.actions if isinstance(action, rec.Tell)}
    assert "elasticjob-mnist-dlrover-master-0" in told["MasterLost"].text
    assert told["MasterLost"].warning
    assert not has(decision, rec.StopNodes)


def test_a_deleted_master_is_made_again_even_if_nobody_saw_it_go() -> None:
    """The operator was away: only the job's status tells that there were three masters."""
    decision = rec.reconcile(see(manifest(status=counted(3, errors=1))), T0)
    assert launched(decision)["metadata"]["name"].endswith("-3")
    assert launched(decision)["metadata"]["annotations"][objects.ERRORS_ANNOTATION] == "1"


def test_a_pod_that_the_status_does_not_know_yet_counts() -> None:
    """The operator died between the pod and the status."""
    pod = master_pod(0, status=evicted())
    assert launched(rec.reconcile(see(manifest(), pod), T0))["metadata"]["name"].endswith("-1")


def test_restart_count_is_honoured() -> None:
    """The prior art drops the restartCount of a dlrover-master replica spec."""
    obj = manifest(master={"restartCount": 5}, status=counted(5))
    fifth = rec.reconcile(see(obj, master_pod(4, status=ended(1), errors=4)), T0)
    assert launched(fifth)["metadata"]["annotations"][objects.ERRORS_ANNOTATION] == "5"
    sixth = rec.reconcile(see(obj, master_pod(5, status=ended(1), errors=5)), T0)
    assert not launches(sixth)
    assert conditions(sixth)["Failed"]["status"] == "True"
    assert "failed 6 times, and its restartCount is 5" in conditions(sixth)["Failed"]["message"]


def test_a_job_without_a_master_s_replica_spec_has_three_errors_to_spare() -> None:
    obj = manifest(status=counted(3))
    assert launches(rec.reconcile(see(obj, master_pod(2, status=ended(1), errors=2)), T0))
    assert not launches(rec.reconcile(see(obj, master_pod(3, status=ended(1), errors=3)), T0))


def test_a_master_that_failed_for_good_takes_its_nodes_with_it() -> None:
    obj = manifest(master={"restartCount": 0}, status=counted(1, phase="Running"))
    decision = rec.reconcile(see(obj, master_pod(0, status=ended(1))), T0)
    kinds = [type(action) for action in decision.actions]
    assert kinds.index(rec.StopNodes) < kinds.index(rec.WriteStatus)
    status = only(decision, rec.WriteStatus).status
    assert (status["phase"], status["completionTime"]) == ("Failed", stamp(T0))
    assert conditions(decision)["Running"]["status"] == "False"


@pytest.mark.parametrize("status", [evicted(), ended(137), ended(143)])
def test_kills_and_evictions_are_never_counted(status: Json) -> None:
    obj = manifest(master={"restartCount": 0}, status=counted(100))
    decision = rec.reconcile(see(obj, master_pod(99, status=status)), T0)
    assert launched(decision)["metadata"]["annotations"][objects.ERRORS_ANNOTATION] == "0"


def test_an_error_after_a_long_life_forgives_those_before_it() -> None:
    obj = manifest(master={"restartCount": 1}, status=counted(9))
    old = master_pod(8, status=ended(1), errors=1, age_s=rec.LONG_S + 1)
    decision = rec.reconcile(see(obj, old), T0)
    assert launched(decision)["metadata"]["annotations"][objects.ERRORS_ANNOTATION] == "1"


def test_masters_that_are_lost_one_after_the_other_are_made_after_growing_pauses() -> None:
    pauses = []
    for losses in range(10):
        pod = master_pod(losses, status=ended(137), losses=losses)
        decision = rec.reconcile(see(manifest(status=counted(losses + 1)), pod), T0)
        if losses == 0:
            assert launches(decision)
            continue
        assert not launches(decision)
        assert decision.again_at is not None
        pauses.append(decision.again_at - T0)
        assert stamp(decision.again_at) in conditions(decision)["MasterRunning"]["message"]
        due = rec.reconcile(see(manifest(status=counted(losses + 1)), pod), decision.again_at)
        count = launched(due)["metadata"]["annotations"][objects.QUICK_LOSSES_ANNOTATION]
        assert count == str(losses + 1)
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256, 300]
    for_days = master_pod(9, status=ended(137), losses=5000)
    assert rec.reconcile(see(manifest(status=counted(9)), for_days), T0).again_at == T0 + 300


def test_a_master_that_ran_for_a_while_is_replaced_without_a_pause() -> None:
    pod = master_pod(9, status=ended(137), losses=9, age_s=rec.SOON_S + 1)
    decision = rec.reconcile(see(manifest(status=counted(10)), pod), T0)
    assert launched(decision)["metadata"]["annotations"][objects.QUICK_LOSSES_ANNOTATION] == "0"


def test_there_is_no_second_master_while_the_first_is_going() -> None:
    pod = master_pod(0, deletionTimestamp=stamp(T0 + 30), deletionGracePeriodSeconds=30)
    decision = rec.reconcile(see(manifest(status=counted(1)), pod), T0)
    assert not launches(decision)
    assert decision.again_at == T0 + 30 + rec.OVERDUE_S


def test_a_master_on_a_machine_that_is_cut_off_is_replaced_in_the_end() -> None:
    """Its pod stays for as long as the machine does not confirm that it has ended."""
    pod = master_pod(0, deletionTimestamp=stamp(T0 - 1 - rec.OVERDUE_S))
    decision = rec.reconcile(see(manifest(status=counted(1)), pod), T0)
    assert launched(decision)["metadata"]["name"].endswith("-1")


def test_only_the_last_pods_of_masters_stay_for_their_logs() -> None:
    pods = [master_pod(number, status=ended(137)) for number in (0, 1, 2)]
    decision = rec.reconcile(see(manifest(status=counted(4)), *pods, master_pod(3)), T0)
    removed = [a.name for a in decision.actions if isinstance(a, rec.RemovePod)]
    assert removed == [names.master_pod_name("mnist", number) for number in (1, 0)]


def test_why_a_master_does_not_start_is_in_words() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "no such tag"}
    container = {"name": "main", "image": "holdfast:typo", "state": {"waiting": waiting}}
    pod = master_pod(0, status={"phase": "Pending", "containerStatuses": [container]})
    decision = rec.reconcile(see(manifest(status=counted(1)), pod), T0)
    found = conditions(decision)["MasterRunning"]
    assert (found["status"], found["reason"]) == ("False", "MasterPending")
    assert "holdfast:typo cannot be pulled" in found["message"]


# ---- not starting --------------------------------------------------------------------------------


def test_a_malformed_job_starts_nothing_and_says_why() -> None:
    obj = manifest(replicaSpec={})
    decision = rec.reconcile(see(obj), T0)
    assert not has(decision, rec.Apply, rec.Create, rec.CreateSecret)
    found = conditions(decision)["Malformed"]
    assert found["status"] == "True"
    assert "spec.replicaSpec: unknown field, did you mean replicaSpecs?" in found["message"]
    assert [a for a in decision.actions if isinstance(a, rec.Tell) and a.warning]
    # The user mends it.
    mended = {**manifest(), "status": only(decision, rec.WriteStatus).status}
    assert launches(rec.reconcile(see(mended), T0))


def test_a_running_job_that_becomes_malformed_goes_on() -> None:
    decision = rec.reconcile(see(manifest(replicaSpec={}, status=counted(1)), master_pod(0)), T0)
    assert conditions(decision)["Malformed"]["status"] == "True"
    assert "goes on" in conditions(decision)["Malformed"]["message"]
    lost = see(manifest(replicaSpec={}, status=counted(1)), master_pod(0, status=evicted()))
    assert launches(rec.reconcile(lost, T0))


def test_a_job_that_is_made_suspended_starts_when_it_is_resumed() -> None:
    decision = rec.reconcile(observe(manifest(suspend=True)), T0)
    assert not has(decision, rec.Apply, rec.Create, rec.CreateSecret)
    status = only(decision, rec.WriteStatus).status
    assert status["phase"] == "Suspended"
    assert conditions(decision)["Suspended"]["status"] == "True"
    resumed = rec.reconcile(observe({**manifest(), "status": status}), T0)
    assert launches(resumed)
    assert only(resumed, rec.WriteStatus).status["phase"] == "Pending"
    assert "Suspended" not in conditions(resumed)


def test_the_master_of_a_job_that_is_suspended_later_stays() -> None:
    obj = manifest(suspend=True, status=counted(1, phase="Suspended"))
    running_master = rec.reconcile(see(obj, master_pod(0)), T0)
    assert not has(running_master, rec.RemovePod, rec.StopNodes)
    assert "phase" not in only(running_master, rec.WriteStatus).status
    assert launches(rec.reconcile(see(obj, master_pod(0, status=evicted())), T0))


def test_what_a_deleted_job_of_the_same_name_left_is_waited_for() -> None:
    """Objects are told apart by the uid of their job, not by its name."""
    pod = master_pod(0, uid="of-the-old-job")
    decision = rec.reconcile(observe(manifest(), [pod]), T0)
    assert not launches(decision)
    assert conditions(decision)["MasterRunning"]["reason"] == "NameTaken"


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    obj = manifest(status=counted(1))
    obj["metadata"]["deletionTimestamp"] = stamp(T0)
    assert rec.reconcile(observe(obj), T0) == rec.Decision()


# ---- status --------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["Running", "Restarting", "Suspended"])
def test_the_phase_is_the_master_s_once_it_has_spoken(phase: str) -> None:
    pod = master_pod(0, status=evicted())
    decision = rec.reconcile(see(manifest(status=counted(1, phase=phase)), pod), T0)
    assert "phase" not in only(decision, rec.WriteStatus).status


def test_the_time_of_a_condition_is_when_it_turned() -> None:
    obj = settled(manifest(status=counted(1)), master_pod(0))
    later = rec.reconcile(see(obj, master_pod(0, status=evicted())), T0 + 50)
    assert conditions(later)["MasterRunning"]["lastTransitionTime"] == stamp(T0 + 50)
    assert conditions(later)["Created"]["lastTransitionTime"] == stamp(T0)


def test_a_refusal_of_the_api_server_is_told_once() -> None:
    seen = see(manifest())
    told = rec.refused(seen, "exceeded quota: pods", T0)
    (written,) = [action for action in told if isinstance(action, rec.WriteStatus)]
    reasons = {c["type"]: (c["reason"], c["message"]) for c in written.status["conditions"]}
    assert reasons["MasterRunning"] == ("Refused", "exceeded quota: pods")
    assert written.status["master"]["launches"] == 0
    again = see({**manifest(), "status": written.status})
    assert rec.refused(again, "exceeded quota: pods", T0 + 5) == ()


def test_notes_about_a_manifest_are_told_and_do_not_stop_it() -> None:
    obj = manifest()
    obj["metadata"]["annotations"] = {"service_type": "http"}
    decision = rec.reconcile(see(obj), T0)
    assert launches(decision)
    assert "service_type" in conditions(decision)["Malformed"]["message"]
    told = [a for a in decision.actions if isinstance(a, rec.Tell) and "service_type" in a.text]
    assert [event.warning for event in told] == [False]


def test_a_status_that_somebody_broke_is_written_anew() -> None:
    obj = manifest(status={"conditions": "none", "master": 5})
    assert has(rec.reconcile(see(obj, master_pod(0)), T0), rec.WriteStatus)


# ---- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_finished_job_gets_no_new_master(phase: str) -> None:
    obj = manifest(status=counted(1, phase=phase, completionTime=stamp(T0)))
    assert not launches(rec.reconcile(see(obj), T0))
    assert not launches(rec.reconcile(see(obj, master_pod(0, status=ended(1))), T0))


def test_a_master_that_ended_well_without_a_word_ends_its_job() -> None:
    pod = master_pod(0, status=ended(0, reason="Completed"))
    decision = rec.reconcile(see(manifest(status=counted(1, phase="Running")), pod), T0)
    assert only(decision, rec.WriteStatus).status["phase"] == "Succeeded"
    assert has(decision, rec.Confirm)
    assert not has(decision, rec.StopNodes)


def test_a_finished_job_goes_after_its_ttl() -> None:
    status = counted(1, phase="Succeeded", completionTime=stamp(T0))
    obj = manifest(status=status, ttlSecondsAfterFinished=60)
    early = rec.reconcile(see(obj), T0 + 59)
    assert not has(early, rec.DeleteJob)
    assert early.again_at == T0 + 60
    assert has(rec.reconcile(see(obj), T0 + 60), rec.DeleteJob)
    kept = rec.reconcile(see(manifest(status=status)), T0 + 1e9)
    assert kept == rec.Decision()


def test_after_the_end_the_master_is_no_longer_called_running() -> None:
    obj = settled(manifest(status=counted(1)), master_pod(0))
    obj["status"].update(phase="Succeeded", completionTime=stamp(T0))
    ended_pod = master_pod(0, status=ended(0, reason="Completed"))
    decision = rec.reconcile(see(obj, ended_pod), T0)
    assert conditions(decision)["MasterRunning"]["reason"] == "Finished"
    assert "phase" not in only(decision, rec.WriteStatus).status
