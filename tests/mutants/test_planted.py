# SPDX-License-Identifier: Apache-2.0
"""Each planted bug is noticed by the tests that are there for it.

A mutant that has no place any more belongs to code that has changed: find it another.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.planted import MUTANTS, Mutant, planted

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0


def test_each_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def surprises(name: str, folder: Path) -> str:
    """What is not as it should be when this mutant is planted; none if the name is empty."""
    command = [sys.executable, "-m", "tests.mutants.planted", name, str(folder / "t")]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return f"{ran.stdout[-3000:]}{ran.stderr[-3000:]}" if ran.returncode != 0 else ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_notice_it(mutant: Mutant, tmp_path: Path) -> None:
    assert not surprises(mutant.name, tmp_path)


def test_with_nothing_planted_they_all_pass(tmp_path: Path) -> None:
    """Run in the same way: what fails, fails because of the mutant."""
    assert not surprises("", tmp_path)


SOURCE = '''"""A module."""


def twice(value):
    return value + value


class Pair:
    """Two of them."""

    def first(self):
        """The one."""
        return self.one


def first():
    return 1
'''


def mutant(function: str, old: str, new: str) -> Mutant:
    return Mutant("x", "module", function, old, new, ())


def test_a_mutant_is_planted_in_its_function_and_nowhere_else() -> None:
    inside = planted(SOURCE, mutant("Pair.first", "self.one", "None"))
    assert inside == SOURCE.replace("self.one", "None")
    before = planted(SOURCE, mutant("Pair.first", "", "if self:\n    return 2"))
    assert before == SOURCE.replace(
        "        return self.one", "        if self:\n            return 2\n        return self.one"
    )
    assert planted(SOURCE, mutant("first", "", "return 3")).endswith("return 3\n    return 1\n")


@pytest.mark.parametrize(
    ("function", "old"), [("twice", "value"), ("first", "self"), ("second", ""), ("Pair", "")]
)
def test_one_without_a_place_is_an_error(function: str, old: str) -> None:
    with pytest.raises(ValueError, match=rf"\b{function}\b"):
        planted(SOURCE, mutant(function, old, "pass"))
