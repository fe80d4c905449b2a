# SPDX-License-Identifier: Apache-2.0
"""Names, labels and ports inside a cluster: the prior art's, so that people's tools find them."""

from holdfast.model.ids import NodeId

GROUP = "elastic.iml.github.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

APP_LABEL = "app"
APP = "holdfast"
JOB_LABEL = "elasticjob.dlrover/name"
ROLE_LABEL = "elasticjob.dlrover/replica-type"
NODE_ID_LABEL = "elasticjob.dlrover/replica-index"
NODE_RANK_LABEL = "elasticjob.dlrover/rank-index"
RELAUNCHES_LABEL = "elasticjob.dlrover/relaunch-count"

MASTER_ROLE = "dlrover-master"
"""The role of the pod that runs the job's master; the others are in `manifest.ROLES`."""

MASTER_PORT = 50001
"""The port where agents attach."""
HTTP_PORT = 50002
"""The port where people and tools look at the job."""

SECRETS_DIR = "/var/run/holdfast"
"""The folder in a pod that has the secrets below, as files of these names."""
TOKEN_KEY = "token"
CA_KEY = "ca.crt"
CERT_KEY = "tls.crt"
KEY_KEY = "tls.key"

STATE_DIR = "/var/lib/holdfast"
"""The folder of the master's journal."""

OPERATOR_MANAGER = "holdfast-operator"
MASTER_MANAGER = "holdfast-master"
"""The owner of the fields written by server-side apply: no owner overwrites another's fields."""

JOB_NAME_LENGTH_MAX = 63 - len("elasticjob--dlrover-master")
"""A Service's name, made from the job's, has at most 63 characters."""


def master_name(job: str) -> str:
    """The name of the master's Service, ServiceAccount, Role, RoleBinding and volume claim."""
    return f"elasticjob-{job}-{MASTER_ROLE}"


def master_pod_name(job: str, number: int) -> str:
    """The name of the master's pod; the number rises with every new pod."""
    return f"{master_name(job)}-{number}"


def master_address(job: str, namespace: str) -> str:
    """The address of the master for agents inside the cluster."""
    return f"{master_name(job)}.{namespace}.svc:{MASTER_PORT}"


def node_pod_name(job: str, role: str, node_id: NodeId) -> str:
    """The name of a node's pod. A node id is unique in the job, so the name identifies the node."""
    return f"{job}-edljob-{role}-{node_id}"


def secret_name(job: str, uid: str) -> str:
    """The name of the Secret with the job's token; a later job of the same name has another one.

    So a client that finds the name taken knows whose it is, without the right to read Secrets.
    """
    return f"{master_name(job)}-{uid[:8]}"


def selector(job: str, role: str = "") -> str:
    """The label selector of all pods of a job, or of those of one role."""
    of_job = f"{JOB_LABEL}={job}"
    return f"{of_job},{ROLE_LABEL}={role}" if role else of_job


def owner_reference(job: str, uid: str) -> dict[str, object]:
    """The reference that makes the job the owner of an object: it is deleted with the job."""
    return {
        "apiVersion": API_VERSION,
        "kind": "ElasticJob",
        "name": job,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
