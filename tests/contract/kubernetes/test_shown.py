# SPDX-License-Identifier: Apache-2.0
"""What `holdfast k8s status` prints on a narrow terminal: nothing is cut."""

import re

import pytest

from holdfast.cli import k8s_show
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.pods import Meta, Pod, Spec, Status
from tests.core.test_tables import whole


@pytest.fixture
def on_60_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "60", "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)


def plain_text(capsys: pytest.CaptureFixture[str]) -> str:
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    whole(text, 60)
    return text


@pytest.mark.usefixtures("on_60_columns")
def test_the_jobs_of_a_cluster_fit_60_columns(capsys: pytest.CaptureFixture[str]) -> None:
    name, host = "train-gpt-neox-20b-edljob-worker-12", "gpu-node-17.cluster.example"
    reason = "the image registry.example/team/train:2026-11 cannot be pulled"
    job = {
        "metadata": {"name": name, "namespace": "research"},
        "spec": {"replicaSpecs": {"worker": {"replicas": 512}}},
        "status": {"phase": "Suspended", "replicas": 511, "step": 123_456, "message": reason},
    }
    labels = {names.ROLE_LABEL: "worker", names.NODE_RANK_LABEL: "12", names.RELAUNCHES_LABEL: "3"}
    meta = Meta(name=name, labels=labels)
    pod = Pod(metadata=meta, spec=Spec(node_name=host), status=Status(phase="Failed"))
    k8s_show.print_jobs([job], "research", as_json=False)
    found = "".join(plain_text(capsys).split())
    assert all(word in found for word in ("message", "512", "511", "123,456"))
    k8s_show.print_job(job, [pod], [], as_json=False)
    text = plain_text(capsys)
    (line,) = [line for line in text.splitlines() if line.startswith("worker")]
    assert line.split()[:2] == ["worker", "12"]
    found = "".join(text.split())
    assert all(word in found for word in ("about", "relaunc", "phase"))
