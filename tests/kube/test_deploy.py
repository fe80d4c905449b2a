# SPDX-License-Identifier: Apache-2.0
"""What people install: the kustomizations, the chart, the examples and the image."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli import main
from holdfast.platforms.kubernetes.manifest import read_job
from holdfast.platforms.kubernetes.scaleplan import read_plan
from tests.kube.cluster import Cluster

pytestmark = pytest.mark.kube

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))
CHART = DEPLOY / "helm" / "holdfast"
Obj = dict[str, Any]


def tool(*words: str | Path, text: str | None = None) -> str:
    """What a program of the virtual environment printed."""
    argv = [str(Path(sys.executable).parent / words[0]), *map(str, words[1:])]
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{shlex.join(argv)}: {done.stderr}"
    return done.stdout


def kustomized(name: str) -> list[Obj]:
    return list(yaml.safe_load_all(tool("kubectl", "kustomize", DEPLOY / name)))


def charted(*words: str) -> list[Obj]:
    text = tool("helm", "template", "release", CHART, "--include-crds", "-n", "ml", *words)
    return [one for one in yaml.safe_load_all(text) if one]


def of_kind(objects: list[Obj], kind: str) -> list[Obj]:
    return [one for one in objects if one["kind"] == kind]


def accepted(cluster: Cluster, objects: list[Obj], *verb: str) -> str:
    """What the server said to all of them, without keeping any."""
    kubectl = ["kubectl", f"--kubeconfig={cluster.kubeconfig()}", "--warnings-as-errors"]
    text = yaml.safe_dump_all(one for one in objects if one["kind"] != "Namespace")
    verb = verb or ("apply", "--server-side")
    return tool(*kubectl, *verb, "--dry-run=server", "-f", "-", text=text)


def in_namespace(objects: list[Obj], namespace: str) -> list[Obj]:
    """The same objects for a namespace that the server has."""
    return [
        {**one, "metadata": {**one["metadata"], "namespace": namespace}}
        if "namespace" in one["metadata"]
        else one
        for one in objects
    ]


@pytest.mark.parametrize("name", ["operator", "namespaced"])
def test_a_kustomization_is_accepted_by_the_server(
    cluster: Cluster, namespace: str, name: str
) -> None:
    objects = kustomized(name)
    assert accepted(cluster, in_namespace(objects, namespace)).count("dry run") == len(objects) - 1


@pytest.mark.parametrize("words", [(), ("--set", "watchNamespaces={one,two}")])
def test_the_chart_is_accepted_by_the_server(
    cluster: Cluster, namespace: str, words: tuple[str, ...]
) -> None:
    objects = charted(*words)
    assert accepted(cluster, in_namespace(objects, namespace)).count("dry run") >= 7


def test_the_chart_has_no_faults() -> None:
    tool("helm", "lint", "--strict", CHART)


def test_the_chart_and_the_kustomization_give_the_same_rights() -> None:
    ours, theirs = kustomized("operator"), charted()
    for kind in ("ClusterRole", "Role"):
        assert [one["rules"] for one in of_kind(ours, kind)] == [
            one["rules"] for one in of_kind(theirs, kind)
        ]
    (subject,) = of_kind(theirs, "ClusterRoleBinding")[0]["subjects"]
    assert subject["namespace"] == "ml"


def test_an_operator_for_some_namespaces_has_no_rights_in_the_others() -> None:
    chart = charted("--set", "watchNamespaces={one,two}")
    bound = [one["metadata"]["namespace"] for one in of_kind(chart, "RoleBinding")]
    assert sorted(bound) == ["ml", "one", "two"]
    for objects in (chart, kustomized("namespaced")):
        assert of_kind(objects, "ClusterRoleBinding") == []
        (deployment,) = of_kind(objects, "Deployment")
        arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        assert any(word.startswith("--namespace=") for word in arguments)


@pytest.mark.parametrize("source", ["chart", "kustomization"])
def test_the_operator_can_do_no_more_than_it_must(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = charted() if source == "chart" else kustomized("operator")
    (deployment,) = of_kind(objects, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": "health"}
    (port,) = container["ports"]
    assert f"--http=0.0.0.0:{port['containerPort']}" in container["args"]
    for role in (*of_kind(objects, "ClusterRole"), *of_kind(objects, "Role")):
        for rule in role["rules"]:
            assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
    # Its words are those that the command knows.
    with pytest.raises(SystemExit) as ended:
        main([*container["args"], "--help"])
    assert ended.value.code == 0
    assert "--master-image" in capsys.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted_and_without_a_remark(
    cluster: Cluster, namespace: str, path: Path
) -> None:
    objects = list(yaml.safe_load_all(path.read_text()))
    for one in objects:
        one["metadata"]["namespace"] = namespace
        if one["kind"] == "ElasticJob":
            job, problems = read_job(one)
            assert job.roles
            assert problems == ()
        elif one["kind"] == "ScalePlan":
            plan, problems = read_plan(one)
            assert plan.plan is not None
            assert problems == ()
    accepted(cluster, objects)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "parameter-server"])
def test_what_an_example_becomes_is_accepted(
    cluster: Cluster, namespace: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # A class may be there already: it belongs to the cluster, and so to all tests.
    classes = DEPLOY / "examples" / "priority-classes.yaml"
    kubeconfig = f"--kubeconfig={cluster.kubeconfig()}"
    tool("kubectl", kubeconfig, "apply", "--server-side", "-f", classes)
    path = str(DEPLOY / "examples" / f"{name}.yaml")
    assert main(["k8s", "render", path, "--namespace", namespace]) == 0
    objects = [one for one in yaml.safe_load_all(capsys.readouterr().out) if one]
    kinds = {one["kind"] for one in objects}
    assert {"Secret", "Service", "Role", "Pod"} <= kinds
    # The token is not shown, and PodGroups are another project's resources.
    known = [one for one in objects if one["kind"] not in ("Secret", "PodGroup")]
    accepted(cluster, known, "create")


def test_the_image_runs_as_nobody_in_particular() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    last_stage = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM")) :]
    (user,) = [line.split()[1] for line in last_stage if line.startswith("USER")]
    assert user.split(":")[0] == "10001"
    assert 'ENTRYPOINT ["holdfast"]' in last_stage
