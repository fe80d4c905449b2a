# SPDX-License-Identifier: Apache-2.0
"""Takes the fields out of what a user wrote, and says what is wrong with them in words.

Nothing here raises for a user's mistake: a wrong field is noted, its default is used, and reading
goes on, so that one look shows every mistake. A field that no reader has taken is unknown.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing about a manifest that its author should know, in one sentence."""

    path: str
    text: str
    fatal: bool = True
    """False for a note: the manifest runs all the same."""
    at_start_only: bool = False
    """True for a problem that keeps a job from starting, but not a running job from going on."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class Fields:
    """One object of a manifest, from which fields are taken by name."""

    def __init__(self, value: object, path: str, problems: list[Problem]) -> None:
        self.path = path
        self._problems = problems
        self._taken: list[str] = []
        self._values: Mapping[object, object] = {}
        if isinstance(value, Mapping):
            self._values = value
        elif value is not None:
            self.problem("", f"must be a mapping of fields, not {show(value)}")

    # ---- saying what is wrong --------------------------------------------------------------------

    def problem(self, name: str, text: str, *, at_start_only: bool = False) -> None:
        """The manifest cannot run like this."""
        self._problems.append(Problem(self._at(name), text, at_start_only=at_start_only))

    def note(self, name: str, text: str) -> None:
        """The manifest runs, and its author should know this."""
        self._problems.append(Problem(self._at(name), text, fatal=False))

    def rest(self) -> None:
        """Note every field that no reader has taken: it has no effect, and its author meant one."""
        for name in self._values:
            if name not in self._taken:
                self.problem(str(name), f"unknown field{suggestion(str(name), self._taken)}")

    # ---- taking fields ---------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether it is there; null counts as absent, as it does in Kubernetes."""
        return self._values.get(name) is not None

    def names(self) -> list[str]:
        """The names of all fields, for objects whose fields the user names."""
        return [str(name) for name in self._values]

    def raw(self, name: str) -> object:
        """The value of any type; None if there is none."""
        self._taken.append(name)
        return self._values.get(name)

    def text(self, name: str, default: str = "") -> str:
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return default if value is None else value
        self.problem(name, f'must be text, not {show(value)}; write it in quotes: "{value}"')
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.problem(name, f"must be true or false, not {show(value)}")
        return default

    def number(self, name: str, default: T, *, minimum: int = 0) -> int | T:
        value = self.raw(name)
        if value is None:
            return default
        # In Python true is the number 1; in a manifest it is not.
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return value
        self.problem(name, f"must be a whole number of at least {minimum}, not {show(value)}")
        return default

    def choice(self, name: str, meanings: Mapping[str, T], default: T) -> T:
        """One of several words, some of which may mean the same."""
        word = self.text(name)
        if not word:
            return default
        if word not in meanings:
            words = ", ".join(dict.fromkeys(meanings))
            hint = suggestion(word, list(meanings))
            self.problem(name, f"must be one of {words}, not {show(word)}{hint}")
            return default
        return meanings[word]

    def nested(self, name: str) -> "Fields":
        """The object of that name; one without fields if there is none."""
        return Fields(self.raw(name), self._at(name), self._problems)

    def items(self, name: str) -> "Iterator[tuple[Fields, object]]":
        """The objects of a list, each with its original value."""
        values = self.raw(name)
        if values is not None and not isinstance(values, list):
            self.problem(name, f"must be a list, not {show(values)}")
            return
        for index, value in enumerate(values or ()):
            # A caller that allows plain text in the list looks at the original value.
            fields = None if isinstance(value, str) else value
            yield Fields(fields, f"{self._at(name)}[{index}]", self._problems), value

    def _at(self, name: str) -> str:
        return f"{self.path}.{name}".strip(".") if name else self.path


def suggestion(name: str, known: list[str]) -> str:
    """The end of a sentence that names what was probably meant; empty if nothing is near."""
    by_lower = {word.lower(): word for word in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f", did you mean {by_lower[near[0]]}?" if near else ""


def show(value: object) -> str:
    """A value in a sentence: short, and written as in a manifest."""
    match value:
        case Mapping():
            return "a mapping"
        case list():
            return "a list"
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value}"' if len(value) <= 60 else f'"{value[:57]}..."'
    return str(value)
