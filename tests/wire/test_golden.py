# SPDX-License-Identifier: Apache-2.0
"""Golden bytes: every message and every record is held to what is written down beside this file."""

import typing
from pathlib import Path

import msgspec
import pytest

from holdfast.core.job import records as rec
from holdfast.core.job.flow import build
from holdfast.core.kernel import Record
from holdfast.model.errors import ProtocolError
from holdfast.model.job import JobSpec
from holdfast.protocol import messages as m
from holdfast.protocol.codec import FrameReader, decode, encode
from tests.core.harness import replayed
from tests.wire.journals import LATER_S, SPECS
from tests.wire.samples import MESSAGES, RECORDS

HERE = Path(__file__).parent
MESSAGE_BYTES = HERE / "messages-v1.txt"
JOURNAL_BYTES = HERE / "journal-v1.txt"
JOURNAL_STATE = HERE / "journal-v1-state.json"


FIRST_MESSAGES = HERE / "messages-v1-first.txt"
FIRST_JOURNAL = HERE / "journal-v1-first.txt"
"""What the first release wrote, before there were checkpoints: never written again."""


def golden(path: Path) -> list[tuple[str, bytes]]:
    lines = path.read_text(encoding="ascii").splitlines()
    return [(name, bytes.fromhex(digits)) for name, digits in (line.split() for line in lines)]


def write_golden(path: Path, values: list[tuple[str, bytes]]) -> None:
    path.write_text("".join(f"{name} {data.hex()}\n" for name, data in values), encoding="ascii")


def snapshot_after(records: list[Record]) -> list[Record]:
    core = build(JobSpec(), "job").core
    for record in records:
        core.replay(record)
    return core.snapshot()


@pytest.fixture(autouse=True, scope="module")
def _rewritten(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("rewrite_golden", default=False):
        frames = [(type(body).__name__, encode(body, 5, "s", 6)) for body in MESSAGES]
        write_golden(MESSAGE_BYTES, frames)
        journal = [(type(record).__name__, rec.encode_record(record)) for record in RECORDS]
        write_golden(JOURNAL_BYTES, journal)
        state = msgspec.json.format(msgspec.json.encode(snapshot_after(RECORDS)), indent=1)
        JOURNAL_STATE.write_bytes(state + b"\n")


def test_every_message_has_golden_bytes() -> None:
    kinds = {kind.__name__ for kind in typing.get_args(m.AnyMessage)}
    assert {name for name, _ in golden(MESSAGE_BYTES)} == kinds


@pytest.mark.parametrize("body", MESSAGES, ids=lambda body: type(body).__name__)
def test_a_message_has_its_golden_bytes_and_comes_back(body: m.AnyMessage) -> None:
    data = dict(golden(MESSAGE_BYTES))[type(body).__name__]
    assert encode(body, 5, "s", 6) == data
    assert list(FrameReader().feed(data)) == [m.Frame(5, body, "s", 6)]


@pytest.mark.parametrize("body", MESSAGES, ids=lambda body: type(body).__name__)
def test_fields_of_a_newer_peer_are_ignored(body: m.AnyMessage) -> None:
    fields = msgspec.msgpack.decode(encode(body, 5, "s", 6)[4:])
    fields[1].append("a field we do not know")
    fields += [None, {"more": 1}]
    assert decode(msgspec.msgpack.encode(fields)) == m.Frame(5, body, "s", 6)


@pytest.mark.parametrize("body", MESSAGES, ids=lambda body: type(body).__name__)
def test_a_message_of_an_older_peer_has_the_defaults(body: m.AnyMessage) -> None:
    """Fields with a default may be missing at the end; those without may not."""
    fields = msgspec.msgpack.decode(encode(body)[4:])
    kind = type(body)
    required = len(kind.__struct_fields__) - len(kind.__struct_defaults__)
    shortest = [0, fields[1][: 1 + required]]
    decoded = decode(msgspec.msgpack.encode(shortest)).body
    for name in kind.__struct_fields__[:required]:
        assert getattr(decoded, name) == getattr(body, name)
    if required:
        shortest[1] = shortest[1][:-1]
        with pytest.raises(ProtocolError):
            decode(msgspec.msgpack.encode(shortest))


def test_an_unknown_message_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode([1, ["Eval", "print()"], "", 0]))


def test_the_golden_journal_holds_every_record() -> None:
    names = {kind.__name__ for kind in rec.KINDS}
    assert {name for name, _ in golden(JOURNAL_BYTES)} == names


@pytest.mark.parametrize("number", range(len(RECORDS)))
def test_a_record_has_its_golden_bytes_and_comes_back(number: int) -> None:
    name, data = golden(JOURNAL_BYTES)[number]
    record = RECORDS[number]
    assert type(record).__name__ == name
    assert rec.encode_record(record) == data
    assert rec.decode_record(data) == record


@pytest.mark.parametrize("number", range(len(RECORDS)))
def test_a_record_of_a_newer_version_is_understood(number: int) -> None:
    fields = msgspec.msgpack.decode(golden(JOURNAL_BYTES)[number][1])
    fields["a field we do not know"] = 1
    assert rec.decode_record(msgspec.msgpack.encode(fields)) == RECORDS[number]


def test_the_golden_journal_leads_to_its_state() -> None:
    journal = [rec.decode_record(data) for _, data in golden(JOURNAL_BYTES)]
    state = msgspec.json.encode(snapshot_after(list(journal)))
    assert msgspec.json.format(state, indent=1) + b"\n" == JOURNAL_STATE.read_bytes()


def test_the_snapshot_of_the_golden_journal_leads_to_the_same_state() -> None:
    snapshot = snapshot_after(RECORDS)
    assert snapshot_after(snapshot) == snapshot


def test_the_bytes_of_the_first_release_are_understood() -> None:
    """Fields were added since: whoever does not send them means their defaults."""
    for name, data in golden(FIRST_MESSAGES):
        (frame,) = FrameReader().feed(data)
        assert type(frame.body).__name__ == name
    journal = [rec.decode_record(data) for _, data in golden(FIRST_JOURNAL)]
    assert [type(record).__name__ for record in journal] == [n for n, _ in golden(FIRST_JOURNAL)]
    snapshot = snapshot_after(list(journal))
    assert snapshot_after(snapshot) == snapshot


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_a_journal_of_wave_1_goes_on_as_it_was(name: str, compacted: bool) -> None:
    """Written by the master before all nodes were in one table, and never written again."""
    journal = [rec.decode_record(data) for _, data in golden(HERE / f"journal-v1-{name}.txt")]
    core = replayed(SPECS[name], journal)
    if compacted:
        core = replayed(SPECS[name], core.core.snapshot())
    view = msgspec.json.decode(msgspec.json.encode(core.view(LATER_S)))
    view["nodes"].sort(key=lambda row: row["node_id"])
    expected = msgspec.json.decode((HERE / f"journal-v1-{name}-view.json").read_bytes())
    assert _known(view, expected) == expected


def _known(found: object, expected: object) -> object:
    """What was found, without fields that wave 1 did not know."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return {name: _known(found.get(name), part) for name, part in expected.items()}
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return [_known(one, other) for one, other in zip(found, expected, strict=True)]
    return found
