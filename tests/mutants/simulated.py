# SPDX-License-Identifier: Apache-2.0
"""Bugs that the simulator must find: in the cores with core mode, in the drivers with driver mode.

    python -m tests.mutants.simulated NAME [FIRST_SEED]

plants one, plays seeds until one fails, and says which. Only the seeds know what is wrong: no test
is named here (tests/mutants/planted.py has those of which a test tells).
"""

import importlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from tests.mutants.planted import Mutant, Planter

CORE_SEEDS, DRIVER_SEEDS = 400, 100
"""So many seeds are played at most."""


def _mutant(name: str, module: str, function: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"holdfast.{module}", function, old, new, ())


CORE_MUTANTS = (
    _mutant(
        "budget_is_exceeded_by_one",
        "core.job.health.verdicts",
        "Verdicts._judge",
        "used - back > limit - 1",
        "used - back > limit",
    ),
    _mutant(
        "commit_with_a_part_missing",
        "core.job.checkpoints.attempts",
        "Attempts.commit_next",
        "if not attempt.missing]",
        "if len(attempt.missing) < 2]",
    ),
    _mutant(
        "data_do_not_go_back_with_the_model",
        "core.job.checkpoints.checkpoints",
        "Checkpoints._agree",
        "state.positions(directory).get(version, stored_positions)",
        "stored_positions",
    ),
    _mutant(
        "go_before_every_node_is_ready",
        "core.job.checkpoints.agreement",
        "Agreement.choose",
        "is_mixed = len(prepared) > 1 or any(body.mixed for body in bodies)",
        "at_hand, is_mixed = max(prepared), False",
    ),
    _mutant(
        "guardian_is_not_told_of_the_lease",
        "core.node.workers",
        "Workers._renew",
        "Outcome(commands=[ev.KeepLease(until)])",
        "Outcome()",
    ),
    _mutant(
        "journal_that_is_behind_is_believed",
        "core.job.membership.nodes",
        "Nodes._attach",
        "why_behind(attach, table)",
        '""',
    ),
    _mutant(
        "late_report_counts_for_the_present_round",
        "core.job.rendezvous.rendezvous",
        "Rendezvous._reported",
        "event.report.round == self._state.round and not self._state.broken",
        "not self._state.broken",
    ),
    _mutant(
        "missed_world_is_not_sent_again",
        "core.job.rendezvous.rendezvous",
        "Rendezvous._node_ready",
        "event.round != self._state.round and member.node_id not in self._state.done",
        "False",
    ),
    _mutant(
        "restart_is_not_written_down",
        "core.job.health.verdicts",
        "Verdicts._judge",
        "commit(self, outcome, counted)",
        "self.apply(counted)",
    ),
    _mutant(
        "safe_before_every_node_has_copied",
        "core.job.checkpoints.replication",
        "Replication.replicated",
        "len(self._waiting) == len(self._crew.index)",
        "len(self._waiting) >= len(self._crew.index) - 1",
    ),
    _mutant(
        "settled_plan_is_done_again_after_a_restart",
        "core.job.membership.fleet",
        "Fleet.resume",
        "",
        "self._table.wanted.plans.clear()",
    ),
    _mutant(
        "shard_is_dealt_before_it_is_written",
        "core.job.data.cutting",
        "Cutter._written",
        "return (end - extent.begin) // step",
        "return -(-(end - extent.begin) // step)",
    ),
    _mutant(
        "silent_world_is_replaced_at_once",
        "core.job.rendezvous.rendezvous",
        "Rendezvous._must_not_form",
        "return self._candidates.is_leased(self._state.index) or self._candidates.has_unstopped()",
        "return False",
    ),
    _mutant(
        "tail_of_a_cut_piece_is_lost",
        "core.job.data.dataset_state",
        "DatasetState._cut",
        "insort(self.open, Piece(piece.epoch, piece.extent, end, piece.end), key=lowest_last)",
        "",
    ),
)
"""For core mode, which plays the cores of master and agents under models of their drivers."""

DRIVER_MUTANTS = (
    _mutant(
        "command_leaves_before_its_record_is_durable",
        "runtime.loop",
        "Driver._write",
        "if entries:",
        "for item in [one for one in waiting if not isinstance(one, tuple)]:\n"
        "                    self._execute(item)\n"
        "                waiting = deque(one for one in waiting if isinstance(one, tuple))\n"
        "                if entries:",
    ),
    _mutant(
        "data_of_what_goes_to_storage_are_not_marked",
        "agent.vault.series",
        "SeriesKeeper.sealed",
        "self._marking.saved(step, self._round)",
        "_ = step.persist or self._marking.saved(step, self._round)",
    ),
    _mutant(
        "frames_of_one_turn_change_places",
        "runtime.transport",
        "Link._flush",
        'b"".join(self._unsent)',
        'b"".join(self._unsent[::-1])',
    ),
    _mutant(
        "request_is_repeated_without_its_key",
        "agent.stream",
        "MasterStream._answered_attach",
        "for number in list(self._outstanding):",
        "for number, (sent, *_, answered) in list(self._outstanding.items()):\n"
        '                    self._outstanding[number] = (sent, "", 0, answered)',
    ),
    _mutant(
        "resume_is_taken_for_an_empty_plan",
        "master.process",
        "take_plans",
        "driver.feed(ev.PlanAsked(plan))",
        "_ = (plan.nodes or plan.remove or plan.suspend) and driver.feed(ev.PlanAsked(plan))",
    ),
    _mutant(
        "rotten_memory_gets_to_storage",
        "agent.vault.storage",
        "Depot.write_parts",
        "if digest_beside(path, version) not in (-1, part.digest):",
        "if False:",
    ),
    _mutant(
        "slots_of_dead_writers_stay_granted",
        "agent.vault.series",
        "SeriesKeeper.begin_round",
        "self._memory.give_back(path)",
        "pass",
    ),
    _mutant(
        "unanswered_request_is_not_sent_again",
        "agent.stream",
        "MasterStream.closed",
        "if isinstance(entry[0], m.Beat):",
        "if entry[0]:",
    ),
)
"""For driver mode: core mode, which models the drivers, cannot see these."""


MISTAKES = re.compile(r"\b(NameError|UnboundLocalError|AttributeError|SyntaxError|ImportError)\b")
"""What a text raises that was not changed with the code around it: that would find nothing."""


def find(name: str, first: int = 0) -> bool:
    """Plant a bug and play seeds until one fails."""
    (mutant,) = (one for one in (*CORE_MUTANTS, *DRIVER_MUTANTS) if one.name == name)
    sys.meta_path.insert(0, Planter(mutant))
    swarm = importlib.import_module("holdfast.sim.swarm")
    is_core = mutant in CORE_MUTANTS
    played = swarm if is_core else importlib.import_module("holdfast.sim.driver_swarm")

    def finds(scenario: Any) -> str:
        problem: str = played.problem_of(scenario)
        assert not MISTAKES.search(problem), f"{name} does not fit the code any more: {problem}"
        return problem

    last = first + (CORE_SEEDS if is_core else DRIVER_SEEDS)
    seeds = ["--first", "--seeds", f"{first}..{last}"]
    has_failed = swarm.main(seeds, swarm.from_seed if is_core else played.scenario_of, finds)
    assert mutant.module in sys.modules, f"{mutant.module} is not played"
    return bool(has_failed)


def main(argv: Sequence[str]) -> int:
    return 0 if find(argv[0], *map(int, argv[1:])) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
