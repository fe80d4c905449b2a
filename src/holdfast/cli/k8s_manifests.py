# SPDX-License-Identifier: Apache-2.0
"""Reads the manifests that a user names, and refuses them as a whole if one has a mistake."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from holdfast.cli.words import plain
from holdfast.model.errors import UsageError
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.fields import Problem
from holdfast.platforms.kubernetes.kinds import ELASTICJOBS, SCALEPLANS, Kind
from holdfast.platforms.kubernetes.manifest import read_job
from holdfast.platforms.kubernetes.scaleplan import read_plan

KINDS = {"ElasticJob": ELASTICJOBS, "ScalePlan": SCALEPLANS}


@dataclass(frozen=True, slots=True)
class Document:
    """One object that a user wants, without any mistake that can be found here."""

    kind: Kind
    obj: Mapping[str, Any]
    title: str
    """Its name for people: "elasticjob/my-job"."""

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """The namespace in the manifest; empty if there is none."""
        return str(self.obj["metadata"].get("namespace") or "")


def read(files: Sequence[Path]) -> list[Document]:
    """Every document of every file. Notes go to standard error; UsageError names all mistakes."""
    documents, mistakes = [], []
    for file in files:
        for obj in _load(file):
            title, kind, problems = _check(obj)
            for problem in problems:
                line = f"{file}: {title}: {plain(str(problem))}"
                if problem.fatal:
                    mistakes.append(line)
                else:
                    print(f"note: {line}", file=sys.stderr)
            documents.append(Document(kind, obj, title))
    if mistakes:
        raise UsageError("\n  ".join(["the manifests have mistakes:", *mistakes]))
    if not documents:
        raise UsageError(f"there is nothing in {', '.join(map(str, files))}")
    return documents


def _load(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
        parsed = list(yaml.safe_load_all(text))
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"{file} cannot be read: {exc}") from exc
    except yaml.YAMLError as exc:
        raise UsageError(f"{file} is no YAML: {' '.join(str(exc).split())}") from exc
    for obj in parsed:
        if obj is None:
            continue  # Only a comment between two separators.
        if not isinstance(obj, Mapping):
            raise UsageError(f"{file} has a document that is no Kubernetes object")
        yield obj


def _check(obj: Mapping[str, Any]) -> tuple[str, Kind, tuple[Problem, ...]]:
    word = obj.get("kind")
    metadata = obj.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(word, str) or word not in KINDS:
        raise UsageError(
            f"{word} {name} is neither an ElasticJob nor a ScalePlan ({names.API_VERSION}): "
            "use kubectl apply for it"
        )
    problems = read_job(obj)[1] if word == "ElasticJob" else read_plan(obj)[1]
    if not name and word == "ScalePlan":
        problems = (*problems, Problem("metadata.name", "a plan needs a name"))
    return f"{word.lower()}/{name}", KINDS[word], problems
