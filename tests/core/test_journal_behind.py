# SPDX-License-Identifier: Apache-2.0
"""A journal that is behind what agents were told ends the job; nothing is decided from it before.

Without this a disk that had lied about a sync made the master give rounds and samples twice, and
ignore agents that ran a newer round, for ever."""

from msgspec.structs import replace

from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.job.flow import JobCore, build
from holdfast.core.job.membership.admission import rules_of
from holdfast.core.job.records import decode_record, encode_record
from holdfast.core.kernel import Outcome
from holdfast.model.dataset import Dataset
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.protocol import data as d
from holdfast.protocol import messages as m

SPEC = JobSpec(min_nodes=1, max_nodes=2, last_call_s=1.0)
TAKE = d.ShardsTake(scope=1, name="train", term=0, epoch=0, want=1, timeout_s=9.0)


class Master:
    """The core and its journal, of which a bad disk can forget the end."""

    def __init__(self) -> None:
        self.journal: list[bytes] = []
        self.core: JobCore = build(SPEC, "job")
        self._links = 0

    def start(self, nonce: str, *, forgets: int = 0) -> None:
        """A master begins, with a journal that has lost so many entries."""
        del self.journal[len(self.journal) - forgets :]
        self.core = build(SPEC, "job")
        for payload in self.journal:
            self.core.core.replay(decode_record(payload))
        self.feed(ev.MasterStarted(nonce, len(self.journal)))

    def feed(self, event: object) -> Outcome:
        outcome = self.core.core.handle(event, 1.0)  # type: ignore[arg-type]
        self.journal += [encode_record(record) for record in outcome.records]
        return outcome

    def state(self) -> tuple[str, str]:
        view = self.core.verdicts.view()
        return str(view["state"]), str(view["reason"])


class Agent:
    """Remembers what a real one does."""

    def __init__(self, master: Master, key: str) -> None:
        self._master = master
        self._attach = m.Attach(key, rules_of(SPEC), 1, "10.0.0.1", 4000)
        self.told: m.Told | None = None
        self.node_id = NodeId(-1)

    def attach(self, link: int, *, round_number: int = 0) -> Outcome:
        attach = replace(self._attach, told=self.told, round=round_number)
        outcome = self._master.feed(ev.AttachRequested(link, 1, attach))
        for body in replies(outcome):
            if isinstance(body, m.Attached):
                self.node_id = NodeId(body.node_id)
                self._attach = replace(self._attach, incarnation=body.incarnation)
                self.told = m.Told(body.journal, body.life, len(self._master.journal))
        return outcome

    def hear(self) -> None:
        """An answer to a beat: it says how far the journal is."""
        assert self.told is not None
        self.told = replace(self.told, position=len(self._master.journal))


def replies(outcome: Outcome) -> list[m.AnyMessage]:
    return [command.body for command in outcome.commands if isinstance(command, cmd.Reply)]


def pushes(outcome: Outcome) -> list[m.AnyMessage]:
    return [command.body for command in outcome.commands if isinstance(command, cmd.Push)]


def two_agents() -> tuple[Master, Agent, Agent]:
    """A job with a world of two."""
    master = Master()
    master.start("m1")
    one, other = Agent(master, "one"), Agent(master, "other")
    one.attach(1)
    other.attach(2)
    one.hear()
    other.hear()
    return master, one, other


def test_a_master_that_has_everything_goes_on() -> None:
    master, one, other = two_agents()
    master.start("m2")
    one.attach(3, round_number=1)
    other.attach(4, round_number=1)
    assert master.state() == ("running", "")


def test_the_agent_that_knows_more_ends_the_job_with_the_numbers_and_is_told() -> None:
    master, one, _ = two_agents()
    knew = len(master.journal)
    master.start("m2", forgets=1)
    outcome = one.attach(3, round_number=1)
    state, reason = master.state()
    assert state == "failed"
    assert "the journal of the master is behind: the agent of node rank 0" in reason
    assert f"was told position {knew}, and the journal ends at {knew - 1}" in reason
    assert "start the job again" in reason
    assert not pushes(outcome), "nobody gets anything to do"
    ends = [command.end for command in outcome.commands if isinstance(command, cmd.FinishJob)]
    assert [end.ok for end in ends] == [False]
    assert any(isinstance(command, cmd.Bind) for command in outcome.commands)


def test_one_of_several_is_enough_and_those_who_know_nothing_change_nothing() -> None:
    master, one, other = two_agents()
    known = len(master.journal)
    master.start("m2")
    other.attach(3, round_number=1)
    lost = len(master.journal) - known
    master.start("m3", forgets=lost)
    one.attach(4, round_number=1)
    assert master.state()[0] == "running", "it was never told anything by m2"
    other.attach(5, round_number=1)
    assert master.state()[0] == "failed"


def test_a_journal_that_has_grown_past_the_number_since_is_behind_all_the_same() -> None:
    """The number alone would not tell: the entries under it are others now."""
    master, one, _ = two_agents()
    master.start("m2", forgets=1)
    for nonce in ("m3", "m4", "m5"):
        master.start(nonce)
    assert one.told is not None
    assert len(master.journal) > one.told.position
    one.attach(3, round_number=1)
    assert master.state()[0] == "failed"


def test_what_a_snapshot_keeps_is_enough_to_know() -> None:
    master, one, _ = two_agents()
    assert one.told is not None
    one.told = replace(one.told, position=one.told.position + 1)
    master.start("m2")
    master.journal = [encode_record(record) for record in master.core.core.snapshot()]
    master.start("m3")
    one.attach(3, round_number=1)
    assert master.state()[0] == "failed"


def test_an_agent_whose_admission_was_forgotten_hears_why() -> None:
    master, _, _ = two_agents()
    before = len(master.journal)
    late = Agent(master, "late")
    late.attach(3)
    master.start("m2", forgets=len(master.journal) - before)
    (refusal,) = replies(late.attach(4))
    assert isinstance(refusal, m.Refused)
    assert refusal.kind == "fenced"
    assert "the journal of the master is behind" in refusal.message
    assert master.state()[0] == "failed"


def test_an_agent_of_a_journal_that_is_lost_is_refused_and_the_new_job_goes_on() -> None:
    master, one, _ = two_agents()
    master.journal.clear()
    master.start("n1")
    (refusal,) = replies(one.attach(3, round_number=1))
    assert isinstance(refusal, m.Refused)
    assert "the journal of this node's master is lost" in refusal.message
    assert master.state() == ("running", "")


def test_an_agent_of_an_older_release_is_let_in() -> None:
    master, one, _ = two_agents()
    one.told = None
    master.start("m2", forgets=1)
    one.attach(3, round_number=1)
    assert master.state()[0] == "running"


def test_no_sample_is_dealt_by_a_new_master_before_every_node_of_its_world_is_back() -> None:
    """Otherwise what the other node has trained on, and the journal forgot, is dealt again."""
    master, one, other = two_agents()
    opened = d.DatasetOpen(scope=1, dataset=Dataset("train", size=100, shard_size=10))
    master.feed(ev.DataRequested(one.node_id, 1, 2, "s", 1, opened))
    master.start("m2")
    one.attach(3, round_number=1)
    held = master.feed(ev.DataRequested(one.node_id, 3, 2, "s", 2, TAKE))
    assert not replies(held)
    dropped = master.feed(ev.DataRequested(one.node_id, 3, 3, "t", 1, TAKE))
    assert not replies(dropped)
    master.feed(ev.RequestDropped("t", 1))
    given = [body for body in replies(other.attach(4, round_number=1)) if is_taken(body)]
    assert len(given) == 1
    at_once = master.feed(ev.DataRequested(other.node_id, 4, 2, "u", 1, TAKE))
    assert [is_taken(body) for body in replies(at_once)] == [True]


def is_taken(body: m.AnyMessage) -> bool:
    return isinstance(body, d.ShardsTaken)
