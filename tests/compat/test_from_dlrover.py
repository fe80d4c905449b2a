# SPDX-License-Identifier: Apache-2.0
"""Reads the tables of docs/from-dlrover.md and tries every row of them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import dlrover_run
from holdfast.cli.dlrover_run import parse_dlrover_run
from holdfast.cli.run_flags import FLAGS
from holdfast.cli.run_options import RunOptions
from holdfast.platforms.kubernetes.manifest import read_job

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "from-dlrover.md"
COMPAT = ROOT / "packages" / "dlrover-compat" / "src"
VERDICTS = ("works", "other name", "refused")

TRY = """
import importlib, json, sys

def found(name):
    module, _, last = name.rpartition(".")
    if last[0].isupper():
        return getattr(importlib.import_module(module), last)
    return importlib.import_module(name)

for name in json.load(sys.stdin):
    try:
        thing = found(name)
        print(json.dumps([name, thing.__module__, thing.__qualname__]), flush=True)
    except ImportError as error:
        print(json.dumps([name, None, str(error)]), flush=True)
"""


def rows(kind: str) -> list[tuple[str, str, str]]:
    """The rows of all tables whose first column has this title: what, verdict, what to know."""
    found, is_ours = [], False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            is_ours = False
        elif cells[1:2] == ["here"]:
            is_ours = cells[0] == kind
        elif is_ours and not set(cells[0]) <= {"-"}:
            what, verdict, more = cells
            found.append((what.strip("`"), verdict, more))
    return found


def python(code: str, text: str = "", path: Path = COMPAT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{path}:{ROOT / 'src'}"}
    return subprocess.run(
        [sys.executable, "-c", code],
        input=text,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def imported() -> dict[str, tuple[str | None, str]]:
    """By name: the module and the name of what was found there, or None and the error."""
    names = [name for kind in ("import", "command") for name, _, _ in rows(kind)]
    done = python(TRY, json.dumps(names))
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (module, text) for name, module, text in answers}


def parse(*argv: str, env: dict[str, str] | None = None) -> RunOptions:
    return parse_dlrover_run([*argv, "train.py"], env or {}, cpus=2, accelerators=0)


def anchors() -> set[str]:
    titles = re.findall(r"^#+ (.+)$", PAGE.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("kind", ["import", "command", "flag", "variable", "field"])
def test_every_row_has_one_of_three_verdicts(kind: str) -> None:
    found = rows(kind)
    assert len(found) >= 3
    assert {verdict for _, verdict, _ in found} <= set(VERDICTS)
    assert len({what for what, _, _ in found}) == len(found)


@pytest.mark.parametrize(
    ("name", "verdict", "more"), [*rows("import"), *rows("command")], ids=lambda value: value[:60]
)
def test_an_import(
    name: str, verdict: str, more: str, imported: dict[str, tuple[str | None, str]]
) -> None:
    module, text = imported[name]
    if verdict == "works":
        assert f"{module}.{text}" == name
        return
    assert module is None, f"{name} can be imported"
    assert "\n" not in text
    anchor = re.search(r"\(docs/from-dlrover\.md#([a-z-]+)\)$", text)
    assert anchor, text
    assert anchor[1] in anchors()
    if verdict == "other name":
        assert "`" in more


def test_other_names_exist() -> None:
    names = {
        name
        for _, verdict, more in rows("import")
        if verdict == "other name"
        for name in re.findall(r"`(holdfast\.[A-Za-z_.]+)`", more)
    }
    assert len(names) >= 4
    for name in names:
        module, _, last = name.rpartition(".")
        path = ROOT / "src" / Path(*module.split("."))
        sources = [path.with_suffix(".py"), path / "__init__.py"]
        text = "".join(source.read_text() for source in sources if source.is_file())
        assert re.search(rf"\b{last}\b", text), name


@pytest.mark.parametrize(("flag", "verdict", "more"), rows("flag"), ids=lambda value: value[:40])
def test_a_flag(flag: str, verdict: str, more: str) -> None:
    options = parse("--local-nodes", "2", *flag.split())
    # Of a flag that takes keys, the key is ignored.
    is_ignored = any(entry.option.startswith(flag.split()[0]) for entry in options.ignored)
    assert is_ignored == (verdict == "refused")


def test_every_flag_of_dlrover_run_is_on_the_page() -> None:
    own = {
        f"--{flag.name}"
        for title, flags in dlrover_run.FLAGS.items()
        if title not in FLAGS
        for flag in flags
    }
    assert own <= {flag.split()[0] for flag, _, _ in rows("flag")}


@pytest.mark.parametrize(("name", "verdict", "more"), rows("variable"))
def test_a_variable(name: str, verdict: str, more: str) -> None:
    name = name.replace("*", "SOMETHING")
    value = {"DLROVER_MASTER_ADDR": "h:1", "DLROVER_LOG_LEVEL": "DEBUG"}.get(name, "1")
    env = {name: value, "HOLDFAST_MASTER": "m:1"} if "RANK" in name else {name: value}
    without = {key: text for key, text in env.items() if key != name}
    options = parse("--auto-config", env=env)
    before = parse("--auto-config", env=without)
    named = [note for note in options.notes if re.search(rf"not read.*\b{name}\b", note)]
    assert len(named) == (verdict == "refused")
    if name == "NODE_NUM":
        more_nodes = parse("--auto-config", "--local-nodes", "3", env={name: "3"})
        assert more_nodes.max_nodes == 3
    elif verdict == "works":
        read = ("master", "node_rank", "log_level")
        assert [getattr(options, one) for one in read] != [getattr(before, one) for one in read]


@pytest.mark.parametrize("text", ["WARN", "FATAL", "CRITICAL", "NOTSET", "30"])
def test_every_level_that_dlrover_takes(text: str) -> None:
    options = parse("--auto-config", env={"DLROVER_LOG_LEVEL": text})
    assert options.log_level is not parse("--auto-config").log_level
    assert options.notes == parse("--auto-config").notes


SAMPLES: dict[str, Any] = {
    "spec.distributionStrategy": "AllreduceStrategy",
    "spec.replicaSpecs": None,
    "spec.resourceLimits": {"cpu": "64"},
    "spec.suspend": True,
    "spec.envs": {"A": {"value": "1"}},
    "spec.replicaSpecs.dlrover-master": {"restartCount": 1},
    "spec.optimizeMode": "cluster",
    "spec.brainService": "brain:50001",
}


@pytest.mark.parametrize(("field", "verdict", "more"), rows("field"))
def test_a_field_of_a_manifest(field: str, verdict: str, more: str) -> None:
    template = {"spec": {"containers": [{"name": "main", "image": "train"}]}}
    obj: dict[str, Any] = {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "job"},
        "spec": {"replicaSpecs": {"worker": {"replicas": 1, "template": template}}},
    }
    if SAMPLES[field] is not None:
        *way, last = field.split(".")
        place = obj
        for name in way:
            place = place[name]
        place[last] = SAMPLES[field]
    _, problems = read_job(obj)
    assert not [str(problem) for problem in problems if problem.fatal]
    assert any(field in str(problem) for problem in problems) == (verdict == "refused")


def test_it_is_not_imported_beside_the_real_one(tmp_path: Path) -> None:
    """What pip leaves of a distribution is enough to know that it is there."""
    info = tmp_path / "dlrover-0.6.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dlrover\nVersion: 0.6.1\n")
    assert python("import dlrover").returncode == 0
    done = python("import dlrover", path=Path(f"{COMPAT}:{tmp_path}"))
    assert done.returncode == 1
    assert "ImportError: dlrover 0.6.1 is installed beside" in done.stderr.splitlines()[-1]


def test_a_method_that_is_not_there_is_refused_in_words() -> None:
    program = """
import copy, torch
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
made = ElasticTrainer(torch.nn.Linear(1, 1))
assert not hasattr(made, "epoch")
assert copy.copy(made).num_steps == 0
made.epoch(3)
"""
    done = python(program)
    assert "ElasticTrainer.epoch is not available on Holdfast: use holdfast.torch" in done.stderr
    assert "docs/from-dlrover.md#data-and-trainer" in done.stderr
