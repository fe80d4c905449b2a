# SPDX-License-Identifier: Apache-2.0
"""Bugs that are planted one at a time, and the tests that must notice each of them.

A mutant is found by the name of a function and not by its lines, so it stays where it is when the
file around it changes. It is planted when the module is imported; no file is changed:

    python -m tests.mutants.planted NAME FOLDER
"""

import ast
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

import pytest

FOUND_IN_DRIVERS = "tests/sim/test_driver_mode.py::test_what_was_once_found_stays_fixed"
AGENT_FENCE = "tests/integration/test_agent_fence.py"
IN_ITS_GRACE = f"{AGENT_FENCE}::test_an_agent_that_is_told_to_go_finishes_its_commit_in_its_grace"
FENCED = f"{AGENT_FENCE}::test_nothing_changes_on_storage_once_the_fence_has_closed"


@dataclass(frozen=True)
class Mutant:
    """A change to one function."""

    name: str
    module: str
    function: str
    """Its name in the module, with that of its class."""
    old: str
    """What is replaced; it is there once. Empty: `new` comes before everything else."""
    new: str
    noticed_by: tuple[str, ...]
    """Every one of these tests, or files of tests, must fail."""


MUTANTS = (
    Mutant(
        "journal_without_fsync",
        "holdfast.runtime.journal",
        "SqliteJournal.open",
        "synchronous = FULL",
        "synchronous = OFF",
        ("tests/contract/test_journal_durable.py",),
    ),
    Mutant(
        "names_in_a_manifest_are_believed",
        "holdfast.checkpoint.manifest",
        "is_safe_name",
        "",
        "return True",
        ("tests/contract/test_manifest_names.py",),
    ),
    Mutant(
        "agents_believe_any_server",
        "holdfast.runtime.transport",
        "Link._shake_hands",
        "",
        "if isinstance(body, m.Welcome):\n    return self._open()",
        ("tests/wire/test_server_proof.py",),
    ),
    Mutant(
        "a_peer_may_be_owed_any_amount",
        "holdfast.runtime.transport",
        "Link._check_debt",
        "",
        "return",
        ("tests/contract/test_strangers.py::test_who_asks_and_never_reads_is_cut",),
    ),
    Mutant(
        "late_tick_is_not_delayed",
        "holdfast.runtime.loop",
        "Driver._tick",
        "",
        "return self._tick_now()",
        ("tests/contract/test_late_ticks.py",),
    ),
    Mutant(
        "slot_may_change_while_it_is_stored",
        "holdfast.checkpoint.persist",
        "write_part",
        "slot.version != meta.version",
        "False",
        ("tests/contract/test_written_parts.py",),
    ),
    Mutant(
        "folder_of_parts_is_not_synced",
        "holdfast.checkpoint.persist",
        "write_part",
        "storage.sync(place)",
        "None",
        ("tests/contract/test_written_parts.py",),
    ),
    Mutant(
        "late_answer_shortens_the_lease",
        "holdfast.core.node.workers",
        "Workers._renew",
        "",
        "self._lease_until = None",
        ("tests/core/test_workers_held.py",),
    ),
    Mutant(
        "held_workers_are_told_gently",
        "holdfast.core.node.workers",
        "Workers._end_workers",
        "gently and not self._is_held",
        "gently",
        ("tests/core/test_workers_held.py",),
    ),
    Mutant(
        "order_is_not_sent_again",
        "holdfast.core.job.checkpoints.attempts",
        "Attempts.node_returned",
        "in attempt.orders if",
        "in () if",
        ("tests/core/test_checkpoints_breakpoints.py",),
    ),
    Mutant(
        "ordered_parts_are_planned_too",
        "holdfast.core.job.checkpoints.attempt",
        "AttemptState.share_of",
        "part not in ordered",
        "True",
        ("tests/core/test_checkpoints_breakpoints.py",),
    ),
    Mutant(
        "workers_do_not_learn_the_digest",
        "holdfast.agent.vault.open",
        "Opener._open_one",
        "ready.kind, known)",
        "ready.kind)",
        (f"{FOUND_IN_DRIVERS}[seed-9000219]",),
    ),
    Mutant(
        "vault_does_not_learn_of_the_lease",
        "holdfast.agent.agent",
        "Agent._lease_renewed",
        "self._vault.leased(until)",
        "None",
        (
            f"{FENCED}[it looks at its files-the master is silent]",
            f"{FENCED}[it looks at its files-the master is away]",
        ),
    ),
    Mutant(
        "vault_does_not_learn_that_the_agent_is_fenced",
        "holdfast.agent.agent",
        "Agent.pushed",
        "self._vault.given_up()",
        "None",
        (f"{FENCED}[it looks at its files-the master says so]",),
    ),
    Mutant(
        "vault_does_not_learn_that_the_agent_was_given_up",
        "holdfast.agent.agent",
        "Agent.refused",
        "self._vault.given_up()",
        "None",
        (f"{FENCED}[it looks at its files-the master had given it up]",),
    ),
    Mutant(
        "vault_does_not_learn_that_the_agent_leaves",
        "holdfast.agent.agent",
        "Agent._part",
        "self._vault.left()",
        "None",
        (
            f"{FENCED}[it looks at its files-the agent ends at once]",
            f"{FENCED}[it looks at its files-its grace is over]",
        ),
    ),
    Mutant(
        "only_the_attach_renews_the_lease_for_the_vault",
        "holdfast.agent.vault.fence",
        "Fence.leased",
        "max(until, self._leased_until)",
        "self._leased_until",
        (f"{AGENT_FENCE}::test_an_agent_whose_lease_is_renewed_commits",),
    ),
    Mutant(
        "retention_asks_no_fence",
        "holdfast.agent.vault.storage",
        "Depot.apply_retention",
        "FencedStorage(await self._open(), fence)",
        "await self._open()",
        (f"{FENCED}[an old step is taken-the master is silent]",),
    ),
    Mutant(
        "what_is_on_its_way_is_left_behind",
        "holdfast.agent.vault.vault",
        "Vault.flush",
        "*(keeper.persister.settled() for keeper in others),",
        "",
        (f"{IN_ITS_GRACE}[False]",),
    ),
)


def planted(source: str, mutant: Mutant) -> str:
    """The source of a module with a mutant in it; ValueError if there is no place for it."""
    lines = source.splitlines(keepends=True)
    function = _find(ast.parse(source), mutant.function.split("."))
    if mutant.old:
        first, last = function.lineno - 1, function.end_lineno
        text = "".join(lines[first:last])
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.old!r} is not once in {mutant.function}")
        lines[first:last] = [text.replace(mutant.old, mutant.new)]
    else:
        has_text = ast.get_docstring(function) is not None and len(function.body) > 1
        begin = function.body[1 if has_text else 0]
        indent = " " * begin.col_offset
        lines[begin.lineno - 1 : begin.lineno - 1] = [
            f"{indent}{line}\n" for line in mutant.new.splitlines()
        ]
    return "".join(lines)


def _find(tree: ast.Module, names: Sequence[str]) -> ast.FunctionDef | ast.AsyncFunctionDef:
    found: ast.AST = tree
    for name in names:
        inside = [
            node
            for node in ast.iter_child_nodes(found)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name == name
        ]
        if len(inside) != 1:
            raise ValueError(f"there is no {'.'.join(names)}")
        found = inside[0]
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        raise ValueError(f"{'.'.join(names)} is no function")
    return found


class Planter(MetaPathFinder):
    """Imports one module with a mutant in it."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._mutant.module:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        return importlib.util.spec_from_file_location(
            name, spec.origin, loader=_Loader(name, spec.origin, self._mutant)
        )


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        """Not from what Python has compiled before, nor kept there."""
        source = self.get_data(self.path).decode()
        return compile(planted(source, self._mutant), self.path, "exec")


def main(name: str, folder: str) -> int:
    """Plant it and run the tests that notice it; 0 if every one does. "": plant nothing.

    `folder` is for their files. Our conftest is left out, because it is for runs that pass.
    """
    mutants = [mutant for mutant in MUTANTS if mutant.name == name or not name]
    if name:
        sys.meta_path.insert(0, Planter(*mutants))
    expected = pytest.ExitCode.TESTS_FAILED if name else pytest.ExitCode.OK
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--basetemp", folder]
    surprises = [
        test
        for test in sorted({test for mutant in mutants for test in mutant.noticed_by})
        if pytest.main([*options, test]) is not expected
    ]
    sys.stdout.write(f"with {name or 'nothing'} planted, {surprises} surprise\n")
    return 1 if surprises or any(mutant.module not in sys.modules for mutant in mutants) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
