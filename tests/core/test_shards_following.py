# SPDX-License-Identifier: Apache-2.0
"""Datasets that follow a checkpoint: the position of a version, and going back to it."""

import msgspec

from holdfast.core.job import events as ev
from holdfast.model.checkpoint import NONE, Version
from holdfast.model.dataset import BY_SHARD, LISTED, STREAM, Dataset, Extent, Piece, Position
from holdfast.model.ids import Round
from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from tests.core.data_ledger import DIRECTORY, DataLedger, done, failed, returned, span, upto

TRAIN = Dataset("train", size=40, shard_size=10, series=DIRECTORY)
V1, V2, V3 = Version(0, 1), Version(0, 2), Version(0, 3)


def positions(ledger: DataLedger) -> dict[int, Position]:
    return {fact.version.step: fact.positions[0] for fact in ledger.said(ev.VersionMarked)}


def test_a_version_has_the_position_of_its_marks_and_not_of_the_reports() -> None:
    ledger = DataLedger(TRAIN)
    (one,) = ledger.take("a")
    (two,) = ledger.take("b")
    ledger.report("a", upto(one, 9))
    assert ledger.mark("a", V1, {0: {one.number: 4}}) is None, "rank 1 has not marked it yet"
    assert not positions(ledger)
    (later,) = ledger.take("b", done(two))
    assert ledger.mark("b", V1, {1: {two.number: 10}}) == m.Done()
    assert ledger.answer["agent a 1"] == m.Done()
    at_v1 = positions(ledger)[1]
    assert (at_v1.epoch, at_v1.cut) == (0, (3,))
    # What was taken after the save is open as a whole.
    assert at_v1.open == (Piece(0, 0, 4, 10), Piece(0, 0, 10, 20), Piece(0, 0, *span(later)))


def test_a_mark_may_be_ahead_of_the_reports() -> None:
    ledger = DataLedger(TRAIN)
    leases = ledger.take("a", want=4)
    ledger.take("b")
    ledger.mark("a", V1, {0: {lease.number: lease.piece.end for lease in leases}, 1: {}})
    assert positions(ledger)[1].open == ()
    assert ledger.is_over("b")


def test_restoring_a_version_deals_again_what_it_had_not_seen() -> None:
    ledger = DataLedger(TRAIN)
    ledger.form(1)
    (one,) = ledger.take("a")
    ledger.mark("a", V1, {0: {one.number: 4}, 1: {}})
    (two,) = ledger.take("b", want=1)
    ledger.report("a", done(one))
    ledger.report("b", done(two))
    ledger.take("c", want=9)
    ledger.take("d")
    ledger.restore(V1, positions(ledger)[1])
    assert ledger.refusal("d").kind == "stale"
    spans = [span(lease) for lease in ledger.take("a", want=9)]
    assert spans == [(4, 10), (10, 20), (20, 30), (30, 40)]


def test_leases_of_before_the_restore_are_worth_nothing() -> None:
    ledger = DataLedger(TRAIN)
    (one,) = ledger.take("a")
    before = ledger.term
    ledger.restore()
    assert ledger.term == before + 1
    ledger.ask("a", d.ShardsTake(0, "train", before, 0, 1, (done(one),)))
    assert ledger.refusal("a") == m.Refused("stale", "dataset 'train' was set back: open it again")
    (again,) = ledger.take("a")
    assert span(again) == span(one)
    assert again.number != one.number


def test_nothing_to_restore_means_the_very_beginning() -> None:
    for version in (NONE, V1):
        ledger = DataLedger(TRAIN)
        ledger.report("a", *map(done, ledger.take("a", want=3)))
        ledger.restore(version)
        assert [span(lease) for lease in ledger.take("a")] == [(0, 10)]


def test_a_dataset_that_is_opened_after_the_load_begins_where_the_checkpoint_was() -> None:
    old = DataLedger(TRAIN)
    (one,) = old.take("a")
    old.mark("a", V1, {0: {one.number: 4}, 1: {}})
    for compact in (False, True):
        ledger = DataLedger(Dataset("other", size=1))
        agreed = ev.RestoreAgreed(DIRECTORY, Round(0), V1, 1, False, (), (positions(old)[1],))
        ledger.feed(agreed)
        ledger.restart(compact=compact)
        ledger.open("a", TRAIN)
        assert [span(lease) for lease in ledger.take("a", want=2)] == [(4, 10), (10, 20)]


def test_a_position_of_a_dataset_that_was_cut_otherwise_is_refused_and_said() -> None:
    old = DataLedger(TRAIN)
    old.mark("a", V1, {0: {}, 1: {}})
    ledger = DataLedger(msgspec.structs.replace(TRAIN, shard_size=20, shuffle=BY_SHARD, seed=9))
    ledger.restore(V1, positions(old)[1])
    why = (
        "the checkpoint has dataset 'train' cut by range shard_size=10 size=40, and it is now "
        "cut by range shard_size=20 size=40 shuffle=shards seed=9"
    )
    assert ledger.refusal("a") == m.Refused("usage", why)
    assert [fact.problem for fact in ledger.said(ev.DatasetRestored)] == [why]
    ledger.restart(compact=True)
    ledger.ask("a", d.ShardsTake(0, "train", ledger.term + 1, 0, 1))
    assert ledger.refusal("a") == m.Refused("usage", why)


# ---- marks ---------------------------------------------------------------------------------------


def test_marks_of_a_version_that_stayed_incomplete_count_for_the_next_one() -> None:
    ledger = DataLedger(TRAIN)
    (one,) = ledger.take("a")
    ledger.report("a", done(one))
    assert ledger.mark("a", V1, {0: {one.number: 10}}) is None
    ledger.mark("a", V2, {0: {}})
    ledger.mark("b", V2, {1: {}})
    assert ledger.answer["agent a 2"] == m.Done()
    assert positions(ledger)[2].open == ()
    refused = ledger.answer["agent a 1"]
    assert isinstance(refused, m.Refused)
    assert refused.kind == "stale"


def test_a_version_never_gets_a_position_after_a_newer_one_has() -> None:
    ledger = DataLedger(TRAIN)
    (one,) = ledger.take("a")
    ledger.mark("a", V2, {0: {one.number: 8}, 1: {}})
    assert isinstance(ledger.mark("a", V1, {0: {one.number: 4}, 1: {}}), m.Refused)
    assert list(positions(ledger)) == [2]


def test_marks_are_said_again_to_a_new_master() -> None:
    ledger = DataLedger(TRAIN)
    (one,) = ledger.take("a")
    assert ledger.mark("a", V1, {0: {one.number: 4}}) is None
    ledger.restart()
    assert ledger.mark("b", V1, {1: {}}) is None
    assert ledger.mark("a", V1, {0: {one.number: 4}}) == m.Done()
    ledger.restart(compact=True)
    assert ledger.mark("b", V1, {1: {}}) == m.Done(), "its answer was lost"
    assert len(positions(ledger)) == 1


def test_marks_count_until_the_next_restore_also_of_lost_nodes_and_old_rounds() -> None:
    """Found by the random histories: leases went back at what was reported, behind the marks."""
    ledger = DataLedger(TRAIN)
    ledger.form(1)
    (one,) = ledger.take("a")
    (two,) = ledger.take("b")
    ledger.report("b", upto(two, 12))
    ledger.lose("b")
    ledger.form(2)
    assert ledger.mark("a", V1, {0: {one.number: 3}}) is None
    assert ledger.mark("b", V1, {1: {two.number: 18}}) == m.Done()
    assert positions(ledger)[1].open == (Piece(0, 0, 3, 10), Piece(0, 0, 18, 20))
    assert ledger.mark("a", V2, {0: {one.number: 3}}) is None
    ledger.restore(V1, positions(ledger)[1], lineage=5)
    assert isinstance(ledger.answer["agent a 2"], m.Refused)
    assert isinstance(ledger.mark("b", V2, {1: {}}), m.Refused)
    assert ledger.mark("a", Version(5, 1), {0: {}, 1: {}}) == m.Done()


def test_nobody_reads_for_a_model_that_is_not_known_yet() -> None:
    """The models of a new round begin with what they restore, or with nothing."""
    ledger = DataLedger(TRAIN)
    ledger.form(1)
    assert len(ledger.take("a")) == 1, "nobody has read before: every model begins with nothing"
    ledger.form(2)
    for compact in (False, True):
        ledger.ask("a", d.ShardsTake(2, "train", ledger.term, 0, 1))
        why = "dataset 'train' follows the checkpoints of /ckpt: load them before you read"
        assert ledger.refusal("a") == m.Refused("usage", why)
        ledger.restart(compact=compact)
    ledger.restore()
    assert [span(lease) for lease in ledger.take("a")] == [(0, 10)]
    ledger.restore()
    ledger.form(3)
    ledger.ask("a", d.ShardsTake(3, "train", ledger.term, 0, 1))
    assert ledger.refusal("a").kind == "usage"


def test_a_step_that_is_saved_again_does_not_move_the_data() -> None:
    ledger = DataLedger(TRAIN)
    (one,) = ledger.take("a")
    ledger.feed(ev.RestoreAgreed(DIRECTORY, Round(0), NONE, 4, True, ()))
    ledger.report("a", upto(one, 5))
    assert ledger.mark("a", Version(4, 1), {0: {one.number: 5}, 1: {}}) == m.Done()
    assert positions(ledger)[1].open == (Piece(0, 0, 5, 10),)


def test_a_given_back_tail_is_in_the_position_once() -> None:
    ledger = DataLedger(TRAIN)
    (one,) = ledger.take("a")
    ledger.mark("a", V1, {0: {one.number: 3}, 1: {}})
    ledger.report("a", returned(one, 6))
    (tail,) = ledger.take("b")
    assert span(tail) == (6, 10)
    ledger.mark("a", V2, {0: {one.number: 3}, 1: {tail.number: 8}})
    assert positions(ledger)[2].open == (Piece(0, 0, 3, 6), Piece(0, 0, 8, 10))


def test_what_is_set_aside_goes_with_the_model_too() -> None:
    ledger = DataLedger(msgspec.structs.replace(TRAIN, attempts=1))
    (one,) = ledger.take("a")
    ledger.mark("a", V1, {0: {one.number: 2}, 1: {}})
    ledger.report("a", failed(one, 5))
    ledger.mark("a", V2, {0: {one.number: 5}, 1: {}})
    assert positions(ledger)[1].aside == ()
    assert positions(ledger)[2].aside == (Piece(0, 0, 5, 10),)
    ledger.restore(V1, positions(ledger)[1])
    assert ledger.view()["set_aside_total"] == 0
    assert span(ledger.take("a")[0]) == (2, 10)


def test_the_rest_of_an_older_epoch_comes_first() -> None:
    dataset = Dataset("train", size=20, shard_size=10, epochs=2, series=DIRECTORY)
    ledger = DataLedger(dataset)
    one, two = ledger.take("a", want=2)
    ledger.report("a", done(one), done(two))
    (next_epoch,) = ledger.take("a", epoch=1)
    ledger.mark("a", V1, {0: {one.number: 10, two.number: 15}, 1: {}})
    at_v1 = positions(ledger)[1]
    assert at_v1.open == (Piece(0, 0, 15, 20), next_epoch.piece)
    ledger.restore(V1, at_v1)
    opened = ledger.open("b", dataset)
    assert isinstance(opened, d.DatasetOpened)
    assert opened.position.epoch == 0
    (rest,) = ledger.take("a", want=9)
    assert rest.piece == Piece(0, 0, 15, 20)
    ledger.take("b", epoch=1)
    assert ledger.answer["b"] is None
    ledger.report("a", done(rest))
    assert [lease.piece for lease in ledger.leases(ledger.answer["b"])] == [next_epoch.piece]


def test_names_that_somebody_needs_again_are_in_the_position() -> None:
    listed = Dataset("train", LISTED, series=DIRECTORY)
    old = DataLedger(listed)
    old.ask("a", d.ShardsAdd(0, "train", 0, (("x", 5), ("y", 6), ("z", 7)), is_last=True))
    one, two = old.take("a", want=2)
    old.mark("a", V1, {0: {one.number: 5, two.number: 2}, 1: {}})
    at_v1 = positions(old)[1]
    assert (at_v1.first_listed, at_v1.listed) == (1, (("y", 6), ("z", 7)))
    ledger = DataLedger(listed)
    ledger.restore(V1, at_v1)
    opened = ledger.open("a", listed)
    assert isinstance(opened, d.DatasetOpened)
    assert (opened.position.first_listed, opened.position.is_listed) == (3, True)
    leases = ledger.take("a", want=9)
    assert [(lease.key, *span(lease)) for lease in leases] == [("y", 2, 6), ("z", 0, 7)]


def test_a_stream_goes_on_in_every_partition() -> None:
    """Prior art 9.4, 14: a restored stream had the dataset's name for every partition."""
    stream = Dataset(
        "train", STREAM, shard_size=10, extents=(Extent("p", -1), Extent("q", -1, 3)),
        series=DIRECTORY,
    )  # fmt: skip
    old = DataLedger(stream)
    p, q, p2 = old.take("a", want=2) + old.take("a")
    old.mark("a", V1, {0: {p.number: 10, q.number: 9, p2.number: 10}, 1: {}})
    ledger = DataLedger(stream)
    ledger.restore(V1, positions(old)[1])
    leases = ledger.take("a", want=4)
    pieces = [(lease.piece.extent, *span(lease)) for lease in leases]
    assert pieces == [(0, 10, 20), (1, 9, 13), (1, 13, 23), (0, 20, 30)]


def test_the_ledger_of_checkpoints_hears_of_every_directory_that_is_followed() -> None:
    ledger = DataLedger(TRAIN, msgspec.structs.replace(TRAIN, name="more"))
    ledger.facts.clear()
    ledger.restart()
    assert ledger.facts == [ev.DatasetFollows(DIRECTORY)]


def test_a_dataset_that_follows_nothing_does_not_move_with_a_restore() -> None:
    ledger = DataLedger(Dataset("train", size=40, shard_size=10))
    ledger.report("a", *map(done, ledger.take("a")))
    ledger.restore()
    assert ledger.term == 0
    assert [span(lease) for lease in ledger.take("a")] == [(10, 20)]
