# SPDX-License-Identifier: Apache-2.0
"""Reads the pages in docs/tutorials, and types what they say into real shells.

A fenced block after `<!-- file: NAME -->` is a file. In a console block, a line that begins with
`$ ` is typed; the lines below it must appear in the output, in this order, with `...` for any text.
Every command must succeed. Comments before a console block change how it is run:

    <!-- second terminal, once the first shows: TEXT -->
    <!-- not run: REASON -->
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import until

LIMIT_S = 240.0

_FILE = re.compile(r"<!-- file: (\S+) -->")
_SECOND_TERMINAL = re.compile(r"<!-- second terminal, once the first shows: (.+) -->")
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
_ENDED = "the command above ended with"


class PageError(AssertionError):
    """The page does not say what happens."""


@dataclass(frozen=True)
class File:
    name: str
    text: str


@dataclass(frozen=True)
class Command:
    text: str
    expected: tuple[str, ...]
    """Lines of its output, `...` for any text."""


@dataclass(frozen=True)
class Console:
    commands: tuple[Command, ...]
    after: str = ""
    """It is typed into a second terminal, once the first one shows this."""
    not_run: str = ""
    """The reason, if it is not run."""


Block = File | Console


def blocks(page: str) -> Iterator[Block]:
    """What a page says to write and to type, in its order; other code blocks are left out."""
    comment = ""
    lines = iter(page.splitlines())
    for line in lines:
        if not line.startswith("```"):
            # An empty line may stand between a comment and its block, as Markdown wants it.
            comment = line if line else comment
            continue
        content = []
        for inner in lines:
            if inner == "```":
                break
            content.append(inner)
        else:
            raise PageError(f"a block that begins with {line} does not end")
        if named := _FILE.fullmatch(comment):
            yield File(named[1], "\n".join(content) + "\n")
        elif line == "```console":
            second, not_run = _SECOND_TERMINAL.fullmatch(comment), _NOT_RUN.fullmatch(comment)
            yield Console(
                tuple(_commands(content)),
                after=second[1] if second else "",
                not_run=not_run[1] if not_run else "",
            )
        comment = ""


def _commands(lines: list[str]) -> Iterator[Command]:
    text, expected = "", list[str]()
    for line in lines:
        if text.endswith("\\"):
            text += f"\n{line}"
        elif line.startswith("$ "):
            if text:
                yield Command(text, tuple(expected))
            text, expected = line[2:], []
        elif text:
            expected.append(line)
        else:
            raise PageError(f"a console block begins with {line!r}, which is not typed")
    yield Command(text, tuple(expected))


def missing_line(expected: tuple[str, ...], output: str) -> str | None:
    """The first expected line that the output does not have at its place."""
    found = iter(output.splitlines())
    for line in expected:
        if line == "...":
            continue  # Any number of lines, also none.
        pattern = re.compile(".*".join(re.escape(part) for part in line.split("...")))
        if not any(pattern.fullmatch(candidate.rstrip()) for candidate in found):
            return line
    return None


class Terminal:
    """A shell that is typed into; a command finds no input of its own."""

    def __init__(self, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._read_from = 0
        with log.open("wb") as output:
            self._shell = subprocess.Popen(
                ["bash", "--norc"],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def type(self, command: Command) -> None:
        assert self._shell.stdin is not None
        script = f"{{ {command.text}\n}} </dev/null\nprintf '\\n{_ENDED} %s\\n' $?\n"
        self._shell.stdin.write(script.encode())
        self._shell.stdin.flush()

    def shown(self) -> str:
        """What the command that was typed last has shown so far."""
        return self._log.read_bytes()[self._read_from :].decode(errors="replace")

    def finish(self, command: Command) -> None:
        """Wait until the command that was typed last has ended, and look at what it did."""
        ended = re.compile(rf"\n{_ENDED} (\d+)\n")
        found = until(lambda: ended.search(self.shown()), LIMIT_S, f"the end of: {command.text}")
        output = found.string[: found.start()]
        self._read_from += len(found.string[: found.end()].encode())
        if found[1] != "0":
            raise PageError(f"$ {command.text}\nended with {found[1]}:\n{output}")
        if (line := missing_line(command.expected, output)) is not None:
            raise PageError(f"$ {command.text}\ndoes not show {line!r} (in this order):\n{output}")

    def close(self) -> None:
        """End what still runs in it; the shell itself ends with its input."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        if self._shell.poll() is None:
            os.killpg(self._shell.pid, signal.SIGTERM)
        self._shell.wait(LIMIT_S)


@contextmanager
def _terminal(folder: Path, environment: Mapping[str, str], log: Path) -> Iterator[Terminal]:
    terminal = Terminal(folder, environment, log)
    try:
        yield terminal
    finally:
        terminal.close()


def follow(page: str, folder: Path, environment: Mapping[str, str], logs: Path) -> None:
    """Do what a page says in `folder`, as its reader would."""
    with ExitStack() as stack:
        first = stack.enter_context(_terminal(folder, environment, logs / "first"))
        second: Terminal | None = None
        found = list(blocks(page))
        for number, block in enumerate(found):
            if isinstance(block, File):
                (folder / block.name).write_text(block.text)
            elif block.after:
                second = second or stack.enter_context(
                    _terminal(folder, environment, logs / "second")
                )
                until(lambda text=block.after: text in first.shown(), LIMIT_S, block.after)
                _run(second, block.commands)
                first.finish(_last_console(found[:number]).commands[-1])
            elif not block.not_run:
                later = found[number + 1] if number + 1 < len(found) else None
                waits = isinstance(later, Console) and later.after != ""
                _run(first, block.commands, is_left_running=waits)


def _run(
    terminal: Terminal, commands: tuple[Command, ...], *, is_left_running: bool = False
) -> None:
    for command in commands:
        terminal.type(command)
        if not (is_left_running and command is commands[-1]):
            terminal.finish(command)


def _last_console(found: list[Block]) -> Console:
    return next(block for block in reversed(found) if isinstance(block, Console))
