# SPDX-License-Identifier: Apache-2.0
"""`holdfast k8s` without a cluster: rendering, and mistakes."""

import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli import main

MANIFESTS = Path(__file__).parents[2] / "kube" / "manifests"
EXAMPLES = Path(__file__).parents[3] / "deploy" / "examples"


def render(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["k8s", "render", *words]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def kinds(objects: list[dict[str, Any]]) -> list[str]:
    return [obj["kind"] for obj in objects]


def test_render_prints_everything_that_a_job_would_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    objects = render(capsys, str(MANIFESTS / "allreduce.yaml"), "--master-image=ours:1")
    of_master = ["ServiceAccount", "Role", "RoleBinding", "Service", "Secret"]
    of_master += ["PersistentVolumeClaim", "Pod"]
    assert kinds(objects) == ["ElasticJob", *of_master, "PodGroup", *["Pod"] * 4]
    master, *nodes = [obj for obj in objects if obj["kind"] == "Pod"]
    assert master["metadata"]["name"] == "elasticjob-gpt-pretrain-dlrover-master-0"
    [container] = master["spec"]["containers"]
    assert container["image"] == "ours:1"
    ids = [f"gpt-pretrain-edljob-worker-{node_id}" for node_id in range(4)]
    assert [node["metadata"]["name"] for node in nodes] == ids
    main_container = nodes[0]["spec"]["containers"][1]
    assert {"name": "NODE_NUM", "value": "4"} in main_container["env"]


def test_render_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    objects = render(capsys, str(MANIFESTS / "allreduce.yaml"))
    [secret] = [obj for obj in objects if obj["kind"] == "Secret"]
    assert set(secret["data"].values()) == {"(made by the operator)"}


def test_render_knows_the_roles_of_a_parameter_server_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    objects = render(capsys, str(MANIFESTS / "parameter-servers.yaml"))
    roles = [
        obj["metadata"]["labels"]["elasticjob.dlrover/replica-type"]
        for obj in objects
        if obj["kind"] == "Pod"
    ]
    counts = {role: roles.count(role) for role in set(roles)}
    assert counts == {"dlrover-master": 1, "ps": 2, "worker": 3, "chief": 1, "evaluator": 1}


def test_render_takes_several_files_and_documents(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(MANIFESTS / name) for name in ("odd.yaml", "scaleplans.yaml")]
    objects = render(capsys, *files, "--namespace=team")
    assert kinds(objects).count("ElasticJob") == 4
    assert kinds(objects).count("ScalePlan") == 3
    secrets = [obj for obj in objects if obj["kind"] == "Secret"]
    assert {secret["metadata"]["namespace"] for secret in secrets} == {"team"}


def test_a_suspended_job_is_rendered_as_it_will_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["k8s", "render", str(MANIFESTS / "odd.yaml")]) == 0
    printed = capsys.readouterr()
    assert "local-job-edljob-worker-0" in printed.out
    assert "elasticjob/local-job is suspended" in printed.err


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_our_examples_have_no_mistakes(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = list(yaml.safe_load_all(example.read_text()))
    if all(document["kind"] in ("ElasticJob", "ScalePlan") for document in documents):
        assert render(capsys, str(example))


def test_notes_do_not_stop_and_are_not_in_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["k8s", "render", str(MANIFESTS / "allreduce.yaml")]) == 0
    printed = capsys.readouterr()
    assert "service_type: has no effect" in printed.err
    assert "has no effect" not in printed.out


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["k8s", *words]) == 2
    return capsys.readouterr().err


def test_all_mistakes_of_all_documents_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (MANIFESTS / "odd.yaml").read_text()
    file = tmp_path / "jobs.yaml"
    file.write_text(text.replace("priority: 0.5", "prority: 0.5").replace("smallest", "Small"))
    said = fails(capsys, "render", str(file))
    assert "elasticjob/odd-manual: spec.replicaSpecs.ps.prority: unknown field" in said
    assert "did you mean priority?" in said
    assert "elasticjob/Small: metadata.name: must begin with a letter" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is nothing in"),
        ("# nothing\n---\n", "there is nothing in"),
        ("a: [", "is no YAML"),
        ("just text", "a document that is no Kubernetes object"),
        ("kind: ConfigMap\nmetadata: {name: c}", "ConfigMap c is neither an ElasticJob nor"),
        ("kind: [a]", "is neither an ElasticJob nor"),
        ("apiVersion: v1\nkind: ElasticJob", "metadata.name: a job needs a name"),
        (
            "apiVersion: elastic.iml.github.io/v1alpha1\nkind: ScalePlan\n"
            "spec: {ownerJob: j, replicaResourceSpecs: {worker: {replicas: 1}}}",
            "metadata.name: a plan needs a name",
        ),
    ],
)
def test_what_is_no_manifest_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    assert said in fails(capsys, "render", str(file))


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot be read" in fails(capsys, "render", str(tmp_path / "missing.yaml"))


def test_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (MANIFESTS / "parameter-servers.yaml").read_text()
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert kinds(render(capsys, "-"))[0] == "ElasticJob"


@pytest.mark.parametrize(
    "words",
    [
        ["scale", "job"],
        ["scale", "job", "--replicas=-1"],
        ["scale", "job", "--replicas=many"],
        ["submit", "job.yaml", "--timeout=0"],
        ["logs", "job", "--tail=x"],
        ["delete"],
    ],
)
def test_mistakes_on_the_command_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--help`" in fails(capsys, *words)


def test_a_kubeconfig_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = fails(capsys, "status", f"--kubeconfig={tmp_path / 'missing'}")
    assert str(tmp_path / "missing") in said
