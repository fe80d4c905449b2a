# SPDX-License-Identifier: Apache-2.0
"""The objects that the operator makes around a master."""

import base64
import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.manifest import ElasticJob, read_job
from holdfast.platforms.kubernetes.operator import objects
from holdfast.runtime.tls import client_tls, server_tls
from holdfast.runtime.token import read_token

UID = "0f9a1c22-1111-2222-3333-444455556666"


def job(master: dict[str, Any] | None = None, name: str = "mnist", **spec: Any) -> ElasticJob:
    worker = {"replicas": 2, "template": template(image="worker:1")}
    replicas = {"worker": worker, **({"dlrover-master": master} if master else {})}
    read, problems = read_job(
        {
            "apiVersion": names.API_VERSION,
            "kind": "ElasticJob",
            "metadata": {"name": name, "namespace": "research", "uid": UID},
            "spec": {"replicaSpecs": replicas, **spec},
        }
    )
    assert not [problem for problem in problems if problem.fatal]
    return read


def template(**container: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", **container}]}}


def pod(of: ElasticJob, default_image: str = "") -> dict[str, Any]:
    return objects.master_pod(of, 3, default_image=default_image, errors=1, quick_losses=2)


def main(body: dict[str, Any]) -> dict[str, Any]:
    found: list[dict[str, Any]] = body["spec"]["containers"]
    return next(container for container in found if container["name"] == "main")


def test_the_master_runs_our_command_as_words_and_never_through_a_shell() -> None:
    """The prior art pastes annotations into `/bin/bash -c` (its weakness: shell injection)."""
    given = template(image="m:1", command=["/bin/bash", "-c", "$(evil)"], args=["; more"])
    found = main(pod(job({"template": given})))
    assert found["command"][:2] == ["holdfast", "master"]
    assert found["args"] == []
    words = dict(zip(found["command"][2::2], found["command"][3::2], strict=True))
    assert words["--job"] == "mnist"
    assert words["--namespace"] == "research"
    assert words["--state"] == names.STATE_DIR
    assert words["--listen"] == "0.0.0.0:50001"
    assert {words["--token-file"], words["--tls-cert"], words["--tls-key"]} == {
        f"{names.SECRETS_DIR}/{key}" for key in ("token", "tls.crt", "tls.key")
    }


def test_a_user_s_template_is_kept_around_the_master() -> None:
    given = {
        "metadata": {"labels": {"team": "vision"}, "annotations": {"note": "mine"}},
        "spec": {
            "nodeSelector": {"pool": "cpu"},
            "terminationGracePeriodSeconds": 77,
            "securityContext": {"runAsUser": 5},
            "volumes": [{"name": "data", "emptyDir": {}}],
            "containers": [
                {"name": "sidecar", "image": "s:1"},
                {
                    "name": "main",
                    "image": "m:1",
                    "resources": {"limits": {"memory": "4Gi"}},
                    "env": [{"name": "A", "value": "1"}],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
            ],
        },
    }
    body = pod(job({"template": given}))
    spec, container = body["spec"], main(body)
    assert body["metadata"]["labels"]["team"] == "vision"
    assert body["metadata"]["annotations"]["note"] == "mine"
    assert spec["nodeSelector"] == {"pool": "cpu"}
    assert spec["terminationGracePeriodSeconds"] == 77
    assert spec["securityContext"]["runAsUser"] == 5
    assert [found["name"] for found in spec["containers"]] == ["sidecar", "main"]
    assert container["resources"] == {"limits": {"memory": "4Gi"}}
    assert container["env"] == [{"name": "A", "value": "1"}]
    assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
    assert {"name": "data", "emptyDir": {}} in spec["volumes"]
    assert given["spec"]["containers"][1]["image"] == "m:1"  # The manifest itself is untouched.


def test_without_a_template_the_master_is_as_unprivileged_as_a_pod_can_be() -> None:
    body = pod(job())
    spec, security = body["spec"], main(body)["securityContext"]
    assert spec["restartPolicy"] == "Never"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert spec["serviceAccountName"] == names.master_name("mnist")


@pytest.mark.parametrize(
    ("own", "default", "in_template", "expected"),
    [
        ("mine:1", "operator:1", "template:1", "mine:1"),
        ("", "operator:1", "template:1", "operator:1"),
        ("", "", "template:1", "template:1"),
        ("", "", "", "worker:1"),
    ],
)
def test_which_image_a_master_has(own: str, default: str, in_template: str, expected: str) -> None:
    """A template of the prior art names its own master's image: the operator's goes before it."""
    master = {"template": template(image=in_template)} if in_template else None
    spec = {"masterImage": own} if own else {}
    assert main(pod(job(master, **spec), default))["image"] == expected


def test_pods_of_masters_are_told_apart_and_remember_what_was_before_them() -> None:
    metadata = pod(job())["metadata"]
    assert metadata["name"] == "elasticjob-mnist-dlrover-master-3"
    assert metadata["annotations"][objects.ERRORS_ANNOTATION] == "1"
    assert metadata["annotations"][objects.QUICK_LOSSES_ANNOTATION] == "2"
    assert metadata["labels"][names.ROLE_LABEL] == "dlrover-master"


def test_everything_belongs_to_the_very_job() -> None:
    made = [body for _, body in objects.kept(job())]
    claim = objects.claim(job())
    assert claim is not None
    made += [claim[1], objects.secret(job()), pod(job())]
    for body in made:
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("ElasticJob", UID, True)
        assert body["metadata"]["namespace"] == "research"
        assert body["metadata"]["labels"][names.JOB_LABEL] == "mnist"


def test_the_state_is_on_a_claim_unless_the_user_gives_it_up() -> None:
    claim = objects.claim(job(stateVolume={"claim": {"size": "5Gi", "storageClassName": "fast"}}))
    assert claim is not None
    assert claim[1]["spec"]["resources"]["requests"]["storage"] == "5Gi"
    assert claim[1]["spec"]["storageClassName"] == "fast"
    volume = next(v for v in pod(job())["spec"]["volumes"] if v["name"] == "holdfast-state")
    assert volume["persistentVolumeClaim"]["claimName"] == claim[1]["metadata"]["name"]

    given_up = job(stateVolume={"emptyDir": {}})
    assert objects.claim(given_up) is None
    volume = next(v for v in pod(given_up)["spec"]["volumes"] if v["name"] == "holdfast-state")
    assert volume["emptyDir"] == {}


def test_a_master_s_role_is_for_its_own_job_and_has_no_secrets_nodes_or_exec() -> None:
    """In the prior art every training pod may exec into every pod and change nodes."""
    rules = objects.master_rules("mnist")
    resources = {resource for rule in rules for resource in rule["resources"]}
    assert not resources & {"secrets", "nodes", "pods/exec", "configmaps", "*"}
    assert all("*" not in rule["verbs"] for rule in rules)
    for rule in rules:
        if any(resource.startswith("elasticjobs") for resource in rule["resources"]):
            assert rule["resourceNames"] == ["mnist"]


def test_weakness_a_job_cannot_give_the_master_s_rights_to_another_account() -> None:
    """Who may create jobs could have any account of the namespace bound to the master's Role."""
    given = {"spec": {**template(image="m:1")["spec"], "serviceAccountName": "of-others"}}
    of = job({"template": given})
    bodies = {body["kind"]: body for _, body in objects.kept(of)}
    own = names.master_name("mnist")
    assert bodies["RoleBinding"]["subjects"][0]["name"] == own
    assert pod(of)["spec"]["serviceAccountName"] == own


UNSAFE = {
    "privileged": True,
    "allowPrivilegeEscalation": True,
    "readOnlyRootFilesystem": False,
    "capabilities": {"add": ["SYS_ADMIN"]},
    "runAsNonRoot": False,
    "seccompProfile": {"type": "Unconfined"},
    "procMount": "Unmasked",
    "appArmorProfile": {"type": "Unconfined"},
    "windowsOptions": {"hostProcess": True},
    "runAsUser": 0,
}
SAFE = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
PROFILES = {
    "container.apparmor.security.beta.kubernetes.io/main": "unconfined",
    "seccomp.security.alpha.kubernetes.io/pod": "unconfined",
}


def unsafe_pod() -> dict[str, Any]:
    """A template whose pod, init containers and containers all give up what protects them."""
    return {
        "metadata": {"annotations": {**PROFILES, "team": "vision"}},
        "spec": {
            "containers": [
                {"name": "main", "image": "m:1", "securityContext": UNSAFE},
                {"name": "sidecar", "image": "s:1", "securityContext": UNSAFE},
            ],
            "initContainers": [{"name": "first", "image": "i:1", "securityContext": UNSAFE}],
            "securityContext": {
                "runAsNonRoot": False,
                "runAsUser": 0,
                "fsGroup": 7,
                "sysctls": [{"name": "kernel.msgmax", "value": "1"}],
            },
            "hostPID": True,
            "hostNetwork": True,
            "hostIPC": True,
        },
    }


def every_container(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [*body["spec"]["initContainers"], *body["spec"]["containers"]]


def test_the_safe_security_context_wins_unless_the_job_says_so_by_name() -> None:
    given = job({"template": unsafe_pod()})
    body = pod(given)
    assert [one["securityContext"] for one in every_container(body)] == [SAFE] * 3
    assert body["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        # Not 0: beside `runAsNonRoot` the kubelet would refuse the pod.
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 7,
    }
    assert not {"hostPID", "hostNetwork", "hostIPC"} & set(body["spec"])
    assert not set(PROFILES) & set(body["metadata"]["annotations"])
    assert body["metadata"]["annotations"]["team"] == "vision"

    meant = pod(replace(given, own_security=True))
    assert [one["securityContext"] for one in every_container(meant)] == [UNSAFE] * 3
    assert meant["spec"]["securityContext"]["runAsUser"] == 0
    assert meant["spec"]["hostPID"] is meant["spec"]["hostNetwork"] is meant["spec"]["hostIPC"]
    assert set(PROFILES) < set(meant["metadata"]["annotations"])


def test_where_the_job_says_so_by_name_the_pod_s_own_words_are_for_its_containers_too() -> None:
    """What we would set in a container goes before what the template says of the whole pod."""
    of_pod = {"runAsNonRoot": False, "runAsUser": 0, "seccompProfile": {"type": "Unconfined"}}
    given = {"spec": {**template(image="m:1")["spec"], "securityContext": of_pod}}
    body = pod(replace(job({"template": given}), own_security=True))
    assert {**body["spec"]["securityContext"], **of_pod} == body["spec"]["securityContext"]
    assert not set(of_pod) & set(main(body)["securityContext"])


def test_a_later_job_of_the_same_name_has_another_secret() -> None:
    first = objects.secret(job())
    assert first["metadata"]["name"].endswith(UID[:8])
    assert first["data"]["token"] != objects.secret(job())["data"]["token"]


def test_the_certificate_of_a_job_has_no_end() -> None:
    """There is nothing to renew, and nothing that a long job outlives."""
    data = objects.secret(job())["data"]
    for key in (names.CA_KEY, names.CERT_KEY):
        certificate = x509.load_pem_x509_certificate(base64.b64decode(data[key]))
        assert certificate.not_valid_after_utc.year == 9999


def test_the_secret_secures_a_connection_to_the_service(tmp_path: Path) -> None:
    """With the very functions that master and agents use, for the name that agents are given."""
    for key, value in objects.secret(job())["data"].items():
        (tmp_path / key).write_bytes(base64.b64decode(value))
        (tmp_path / key).chmod(0o440)
    assert len(read_token(tmp_path / names.TOKEN_KEY)) == 64
    server = server_tls(tmp_path / names.CERT_KEY, tmp_path / names.KEY_KEY)
    client = client_tls(tmp_path / names.CA_KEY)
    assert server is not None
    assert client is not None
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    host = names.master_address("mnist", "research").partition(":")[0]
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(60)
    with ours, theirs:
        answering = threading.Thread(target=_shake_hands, args=(server, theirs))
        answering.start()
        try:
            with client.wrap_socket(ours, server_hostname=host) as secured:
                assert secured.recv(5) == b"hello"
        finally:
            answering.join(60)


def test_the_secret_s_certificate_is_for_no_other_job(tmp_path: Path) -> None:
    for key, value in objects.secret(job(name="other"))["data"].items():
        (tmp_path / key).write_bytes(base64.b64decode(value))
    server = server_tls(tmp_path / names.CERT_KEY, tmp_path / names.KEY_KEY)
    client = client_tls(tmp_path / names.CA_KEY)
    assert server is not None
    assert client is not None
    host = names.master_address("mnist", "research").partition(":")[0]
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(60)
    with ours, theirs:
        answering = threading.Thread(target=_shake_hands, args=(server, theirs))
        answering.start()
        try:
            with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
                client.wrap_socket(ours, server_hostname=host)
        finally:
            ours.close()
            answering.join(60)


def _shake_hands(context: ssl.SSLContext, peer: socket.socket) -> None:
    try:
        with context.wrap_socket(peer, server_side=True) as secured:
            secured.sendall(b"hello")
    except OSError:
        return  # The client did not like what it saw.
