# SPDX-License-Identifier: Apache-2.0
"""Holds the tree to the style rules, and each rule to a snippet that it must catch."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.tidy import rules
from tests.tidy.rules import File, Finding

ROOT = Path(__file__).resolve().parents[2]

SOURCE = "src/holdfast/*"
TESTS = "tests/*"
FOLDERS = ("src", "tests", "bench", "examples", "packages")
ALL = tuple(f"{folder}/*" for folder in FOLDERS)

# Started by us, but the user's process from then on: these have nobody above them who would know.
# What a user allows by `allow_pickle=True`, and files that other frameworks' own readers want so.
FOREIGN_FORMATS = (
    "src/holdfast/torch/checkpoint/opaque.py",
    "src/holdfast/torch/checkpoint/zip_image.py",
)
WORKER_ENTRY_POINTS = ("src/holdfast/worker/bootstrap.py", "src/holdfast/worker/zygote.py")

BORDERS = ("src/holdfast/runtime/loop.py", "src/holdfast/cli/*", *WORKER_ENTRY_POINTS)
"""Where everything may be caught, because the reaction (log, report, exit code) is known there."""

RATCHET: dict[str, int] = {}
"""Lines of what is too large for now, as "path" or "path::Class.function". It may only shrink."""


@dataclass(frozen=True)
class Rule:
    """Where a rule applies, with a snippet that it must catch and one that it must let pass."""

    check: Callable[[File], Iterable[Finding]]
    bad: str
    good: str
    applies_to: tuple[str, ...] = (SOURCE,)
    except_in: tuple[str, ...] = ()


RULES = {
    "line length": Rule(
        rules.long_lines,
        bad=f"x = '{'x' * 100}'\n",
        good=f"x = '{'x' * 90}'\n",
        applies_to=ALL,
    ),
    "broad except only at borders": Rule(
        rules.broad_handlers,
        bad="try:\n    f()\nexcept (OSError, Exception):\n    raise\n",
        good="try:\n    f()\nexcept OSError:\n    pass\n",
        except_in=BORDERS,
    ),
    "broad except never swallows": Rule(
        rules.silent_broad_handlers,
        bad="try:\n    f()\nexcept Exception as e:\n    log.error('failed: %s', e)\n",
        good="try:\n    f()\nexcept Exception:\n    log.exception('failed')\n",
    ),
    "no broad suppress": Rule(
        rules.silent_broad_handlers,
        bad="with contextlib.suppress(BaseException):\n    f()\n",
        good="with contextlib.suppress(OSError):\n    f()\n",
    ),
    "wall clock only in observe": Rule(
        rules.wall_clock,
        bad="import time as t\nnow = t.time()\n",
        good="import time\nnow = time.monotonic()\ntext = 'time.time()'\n",
        except_in=("src/holdfast/runtime/observe.py",),
    ),
    "wall clock not imported by name": Rule(
        rules.wall_clock,
        bad="from time import time\n",
        good="from time import monotonic\n",
        except_in=("src/holdfast/runtime/observe.py",),
    ),
    "environment only in settings": Rule(
        rules.environment,
        bad="import os\nvalue = os.environ['HOME']\n",
        good="def child(environ: dict[str, str]) -> str:\n    return environ['HOME']\n",
        except_in=("src/holdfast/runtime/settings.py", *WORKER_ENTRY_POINTS),
    ),
    "environment not imported by name": Rule(
        rules.environment,
        bad="from os import getenv\n",
        good="from os import getpid\n",
        except_in=("src/holdfast/runtime/settings.py", *WORKER_ENTRY_POINTS),
    ),
    "no pickle": Rule(
        rules.unsafe_formats,
        bad="def load():\n    from pickle import loads\n",
        good="import json\ntext = 'import pickle'\n",
        except_in=FOREIGN_FORMATS,
    ),
    "no pickle by option": Rule(
        rules.unsafe_formats,
        bad="state = torch.load(path, weights_only=False)\n",
        good="state = torch.load(path, weights_only=True)\n",
        except_in=FOREIGN_FORMATS,
    ),
    "no sleep in tests": Rule(
        rules.sleeps,
        bad="import asyncio\nasync def test():\n    await asyncio.sleep(1)\n",
        good="start(['sleep', '60'])\n",
        applies_to=(TESTS,),
    ),
    "no mocks of the core": Rule(
        rules.mocks,
        bad="from unittest import mock\n",
        good="from tests.waiting import until\n",
        applies_to=("tests/core/*", "tests/scenarios/*", "tests/sim/*"),
    ),
    "no monkeypatch of the core": Rule(
        rules.mocks,
        bad="def test(monkeypatch):\n    pass\n",
        good="def test(tmp_path):\n    pass\n",
        applies_to=("tests/core/*", "tests/scenarios/*", "tests/sim/*"),
    ),
    "no private access in tests": Rule(
        rules.private_access,
        bad="assert driver._held == {}\n",
        good="class Fake:\n    def f(self):\n        return self._x, super()._y, self.__class__\n",
        applies_to=(TESTS,),
    ),
    "no private imports in tests": Rule(
        rules.private_access,
        bad="from holdfast.core.kernel import _Router\n",
        good="from holdfast.core.kernel import Router\n",
        applies_to=(TESTS,),
    ),
    "frozen dataclasses": Rule(
        rules.mutable_dataclasses,
        bad="@dataclass(frozen=True)\nclass Joined:\n    node: int\n",
        good=(
            "@dataclass(frozen=True, slots=True)\nclass Joined:\n    node: int\n"
            "@dataclass(slots=True)\nclass _Member:\n    seen_at: float\n"
            "@dataclass(slots=True)\nclass RoundState:\n    number: int\n"
        ),
        applies_to=("src/holdfast/model/*", "src/holdfast/protocol/*", "src/holdfast/core/*"),
    ),
    "no TODO without issue": Rule(
        rules.promises,
        bad="x = 1  # TODO: later\n",
        good="x = 1  # TODO(#12): when nodes have names\ny = 'TODO'\n",
        applies_to=ALL,
    ),
    "no commented-out line": Rule(
        rules.commented_out_code,
        bad="x = 1\n# y = f(x)\n",
        good="# Give work back before regrouping.\n# note: workers\nx = 1  # seconds\n",
        applies_to=ALL,
    ),
    "no commented-out block": Rule(
        rules.commented_out_code,
        bad="# if ready:\n#     (start or stop)\nx = 1\n",
        good="# if ready: start the\n# next round\nx = 1\n",
        applies_to=ALL,
    ),
    "comments name the actor": Rule(
        rules.sentences_without_actor,
        bad="# Nobody waits for it.\nx = 1\n",
        good="# No agent waits for it.\nx = 'nobody'\n",
    ),
    "docstrings name the actor": Rule(
        rules.sentences_without_actor,
        bad='def f():\n    """Tell whoever asks."""\n',
        good='def f():\n    """Tell the worker that asks."""\n',
    ),
    "licence line": Rule(
        rules.missing_licence,
        bad='"""A module."""\n',
        good=f"#!/usr/bin/env python3\n{rules.SPDX}\n",
        applies_to=ALL,
    ),
    "module docstring": Rule(
        rules.missing_docstring,
        bad=f"{rules.SPDX}\nx = 1\n",
        good=f'{rules.SPDX}\n"""Why it exists."""\nx = 1\n',
        applies_to=ALL,
    ),
    "exports": Rule(
        rules.wrong_exports,
        bad="from holdfast.client.data import shards\n__all__ = ['barrier']\n",
        good=(
            "from typing import Final\nfrom .data import shards\n"
            "N: Final = 1\n__all__ = ['N', 'shards']\n"
        ),
        applies_to=tuple(
            f"src/holdfast/{name}/__init__.py" for name in ("client", "torch", "ports")
        ),
    ),
}


TREE_RULES = list({rule.check: name for name, rule in RULES.items()}.values())
"""Once per check: entries that share a check differ in their snippets only."""


@dataclass
class Tree:
    """What was found in all files: breaches by rule, and by name the lines of what is too large."""

    breaches: dict[str, list[str]]
    over: dict[str, int]


@pytest.fixture(scope="module")
def tree() -> Tree:
    """One pass for all rules, because parsing takes longer than every check."""
    found = Tree(breaches={name: [] for name in TREE_RULES}, over={})
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        file = File(path.read_text(encoding="utf-8"))
        for rule in TREE_RULES:
            if applies(RULES[rule], name):
                found.breaches[rule] += [
                    f"{name}:{finding.line}: {finding.what}" for finding in RULES[rule].check(file)
                ]
        for part, lines in rules.sizes_over_limit(file).items():
            found.over[f"{name}::{part}" if part else name] = lines
    return found


def applies(rule: Rule, name: str) -> bool:
    """Whether the file of this name must follow the rule."""
    return any(fnmatch(name, pattern) for pattern in rule.applies_to) and not any(
        fnmatch(name, pattern) for pattern in rule.except_in
    )


@pytest.mark.parametrize("name", TREE_RULES)
def test_the_tree_follows_the_rule(name: str, tree: Tree) -> None:
    breaches = tree.breaches[name]
    assert not breaches, "\n" + "\n".join(breaches)


@pytest.mark.parametrize("name", RULES)
def test_the_rule_can_fail(name: str) -> None:
    rule = RULES[name]
    assert list(rule.check(File(rule.bad))), "the bad snippet was not caught"
    assert not list(rule.check(File(rule.good))), "the good snippet was caught"


def ratchet_breaches(over: dict[str, int], ratchet: dict[str, int]) -> list[str]:
    """What is too large and not in the ratchet, or not as the ratchet says."""
    breaches = []
    for name in sorted(over.keys() | ratchet.keys()):
        lines, allowed = over.get(name), ratchet.get(name)
        if lines is None:
            breaches.append(f"{name}: within the limit now, remove it from RATCHET")
        elif allowed is None or lines > allowed:
            breaches.append(f"{name}: {lines} lines are too many, divide it")
        elif lines < allowed:
            breaches.append(f"{name}: shrunk to {lines} lines, lower its RATCHET entry")
    return breaches


_BARE_INSTALL = re.compile(r"""pip3? install (?:-\S+ )*['"]?holdfast(?![\w*/.-])""")


def bare_installs(text: str) -> list[str]:
    """Lines that fetch by name what is not published: who obeys gets nothing, or a stranger's."""
    return [
        line
        for line in text.splitlines()
        if _BARE_INSTALL.search(line) and "finds nothing of ours" not in line
    ]


def test_no_page_installs_what_is_not_published() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    assert len(pages) > 10
    found = {page.name: bare_installs(page.read_text(encoding="utf-8")) for page in pages}
    assert not {name: lines for name, lines in found.items() if lines}


def test_bare_installs_are_found() -> None:
    for bad in ("`pip install holdfast`", "pip install -U 'holdfast[ray]'"):
        assert bare_installs(bad)
    for good in ("pip install dist/holdfast-*.whl", "pip install '/path/to/holdfast[torch]'"):
        assert not bare_installs(good)


def test_sizes(tree: Tree) -> None:
    breaches = ratchet_breaches(tree.over, RATCHET)
    assert not breaches, "\n" + "\n".join(breaches)


def test_sizes_are_measured() -> None:
    function = "    def f(self):\n" + "        x = 1\n" * 80
    assert rules.sizes_over_limit(File("class A:\n" + function)) == {"A.f": 81}
    assert rules.sizes_over_limit(File("class A:\n" + "    x = 1\n" * 400)) == {"A": 401}
    assert rules.sizes_over_limit(File("x = 1\n" * 801)) == {"": 801}
    assert rules.sizes_over_limit(File("x = 1\n" * 800)) == {}


@pytest.mark.parametrize(
    ("lines", "allowed", "is_breach"),
    [(70, None, True), (71, 70, True), (70, 70, False), (65, 70, True), (None, 70, True)],
    ids=["new", "grown", "as before", "shrunk", "stale"],
)
def test_the_ratchet_only_shrinks(lines: int | None, allowed: int | None, is_breach: bool) -> None:
    over = {} if lines is None else {"a.py::f": lines}
    ratchet = {} if allowed is None else {"a.py::f": allowed}
    assert bool(ratchet_breaches(over, ratchet)) is is_breach
