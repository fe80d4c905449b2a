# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help, suggestions, completion, and that help is cheap."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast.cli import COMMANDS, build_parser, main
from holdfast.cli.completion import SHELLS
from holdfast.cli.dlrover_run import FLAGS as DLROVER_FLAGS
from holdfast.cli.parser import HelpfulParser, subcommands
from holdfast.cli.run_flags import FLAGS
from holdfast.cli.run_flags import build_parser as build_run_parser


def commands_of(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], HelpfulParser, bool]]:
    """Every command below, with its words, its parser, and whether it is a group of commands."""
    assert isinstance(parser, HelpfulParser)
    below = subcommands(parser)
    yield words, parser, bool(below)
    for name, command in below.items():
        yield from commands_of(command, (*words, name))


TREE = list(commands_of(build_parser(tuple(COMMANDS))))
GROUPS = [words for words, _, is_group in TREE if is_group]
EXAMPLES = [example for _, parser, _ in TREE for example in parser.examples]


def test_the_groups_are_found() -> None:
    assert set(GROUPS) == {(), ("ckpt",), ("data",), ("k8s",)}


@pytest.mark.parametrize("words", GROUPS, ids=" ".join)
def test_a_bare_group_shows_its_help(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    help_text = capfd.readouterr().out
    assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2, "a script whose variable is empty must not succeed"
    assert capfd.readouterr() == ("", help_text)


@pytest.mark.parametrize("words", [words for words, _, _ in TREE if words], ids=" ".join)
def test_a_mistyped_command_is_recognized(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    *group, name = words
    typed = name + name[-1]
    assert main([*group, typed]) == 2
    prog = " ".join(["holdfast", *group])
    said = f"holdfast: '{typed}' is not a command of {prog}: did you mean {name}?\n"
    assert capfd.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rnu", "train.py"], "'rnu' is not a command of holdfast: did you mean run?"),
        (["zzz"], "'zzz' is not a command of holdfast: choose from run, status, "),
        (["--verson"], "--verson is not an option of holdfast: did you mean --version?"),
        (["status", "--folow"], "--folow is not an option of holdfast status: did you mean --fol"),
        (["status", "--zzz=1"], "--zzz is not an option of holdfast status (see `holdfast status"),
        (["status", "bert"], "'bert' is one argument too many (see `holdfast status --help`)"),
        (["sim", "--decide", "x"], "--decide is not an option of holdfast sim"),
        (["master", "--platform", "kubernets"], "'kubernets' is not known: did you mean kubernet"),
        (["run", "--nproc-per-nod", "2"], "did you mean --nproc-per-node?"),
    ],
)
def test_mistakes(words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert sentence in err


def test_every_command_shows_examples() -> None:
    assert [words for words, parser, _ in TREE if not parser.examples] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_in_the_help_are_valid(example: str) -> None:
    words = shlex.split(example.removeprefix('eval "$(').removesuffix(')"'))
    if ">" in words:
        words = words[: words.index(">")]
    assert words[0] == "holdfast"
    build_parser(tuple(COMMANDS)).parse_args(words[1:])


@pytest.mark.parametrize(("flags", "command"), [(FLAGS, "holdfast run"), (DLROVER_FLAGS, "other")])
def test_the_help_of_run_ends_with_its_examples(flags: dict[str, object], command: str) -> None:
    parser = build_run_parser(flags, command)  # type: ignore[arg-type]
    assert parser.examples
    assert all(example.startswith(command + " ") for example in parser.examples)
    assert parser.format_help().endswith(f"  {parser.examples[-1]}\n")


def test_the_module_is_the_command(tmp_path: Path) -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "holdfast", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert asked.stdout == f"holdfast {__version__}\n"


def test_help_imports_no_command() -> None:
    """To import all of them takes half a second."""
    program = (
        "import sys\nfrom holdfast.cli import COMMANDS, main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'msgspec', 'rich', *(f'holdfast.cli.{name}' for name in COMMANDS)}\n"
        "sys.exit(f'imported: {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)\n"
    )
    asked = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (asked.returncode, asked.stderr) == (0, "")
    assert all(f"\n    {name}" in asked.stdout for name in COMMANDS)


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_command(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capfd.readouterr().out
    for words, _, _ in TREE:
        assert all(word in script for word in words)
    assert "nproc-per-node" in script
    assert "nproc_per_node" not in script, "the second spelling is not for the eyes"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (("ru",), ["run"]),
        (("ckpt", ""), ["ls", "show", "verify", "export", "rm"]),
        (("run", "--nproc"), ["--nproc-per-node"]),
        (("status", "--fol"), ["--follow"]),
        (("ckpt", "export", "--format", "d"), ["dcp"]),
        (("run", "tra"), ["train.py"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_bash_completes(
    typed: tuple[str, ...], expected: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    main(["completion", "bash"])
    script = tmp_path / "completion.bash"
    script.write_text(capfd.readouterr().out)
    (tmp_path / "train.py").touch()
    words = " ".join(shlex.quote(word) for word in ("holdfast", *typed))
    program = (
        f"source {shlex.quote(str(script))}; compopt() {{ :; }}\n"
        f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; COMPREPLY=()\n"
        "_shtab_holdfast; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    asked = subprocess.run(
        ["bash", "--norc", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert asked.stderr == ""
    assert set(expected) <= set(asked.stdout.split())
    assert all(word.startswith(typed[-1]) for word in asked.stdout.split())
