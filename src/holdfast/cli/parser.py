# SPDX-License-Identifier: Apache-2.0
"""The argument parsers of the command line: examples in the help, suggestions for mistakes."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from holdfast.model.errors import UsageError

EXIT_USAGE = 2


def closest(word: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant: one that begins like `word`, or is spelled like it."""
    names = list(known)
    if len(word.lstrip("-")) > 2:
        for name in names:
            if name.startswith(word):
                return name
    alike = difflib.get_close_matches(word, names, n=1, cutoff=0.65)
    return alike[0] if alike else None


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands of a group, by name; empty for a command."""
    groups = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return {name: command for group in groups for name, command in group.choices.items()}


class HelpfulParser(argparse.ArgumentParser):
    """A parser whose help ends with examples."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_help(self) -> str:
        text = super().format_help()
        if self.examples:
            text += "\nexamples:\n" + "".join(f"  {example}\n" for example in self.examples)
        return text


class Parser(HelpfulParser):
    """Reports every mistake in one sentence; a group without a command shows its help."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse unknown words here: a command's own parser knows best which names are near."""
        words = list(args or ())
        if self._subparsers is not None:
            if not words:
                self.print_help(sys.stderr)
                self.exit(EXIT_USAGE)
            if words[0].startswith("-") and words[0] not in self._option_string_actions:
                self._refuse(words[0])
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self._refuse(unknown[0])
        return parsed, unknown

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"{word!r} is one argument too many")
        name = word.split("=", 1)[0]
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        near = closest(name, (option for action in shown for option in action.option_strings))
        if near is None:
            self.error(f"{name} is not an option of {self.prog}")
        raise UsageError(f"{name} is not an option of {self.prog}: did you mean {near}?")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As in argparse, with a suggestion."""
        choices = [str(choice) for choice in action.choices or ()]
        if not choices or value in choices:
            return
        near = closest(str(value), choices)
        hint = f"did you mean {near}?" if near else f"choose from {', '.join(choices)}"
        if isinstance(action, argparse._SubParsersAction):
            raise UsageError(f"{value!r} is not a command of {self.prog}: {hint}")
        raise argparse.ArgumentError(action, f"{value!r} is not known: {hint}")
