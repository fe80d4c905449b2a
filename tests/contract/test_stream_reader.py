# SPDX-License-Identifier: Apache-2.0
"""What every StreamReader promises, shown with a real broker: NATS JetStream."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from nats.js import JetStreamContext

from holdfast.client.data.nats_reader import AT_ONCE, NatsReader
from holdfast.model.errors import StateError, TimedOutError, UsageError
from holdfast.ports import StreamReader
from tests.brokers import Broker, nats_server

LONG_S = 60.0
"""Nothing here takes this long; a loaded machine does not break a test."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with nats_server(tmp_path_factory.mktemp("nats")) as broker:
        yield broker


@pytest.fixture
def broker(server: Broker, request: pytest.FixtureRequest) -> Iterator[Broker]:
    """With the empty partitions p and q."""
    server.add("p", "q")
    yield server

    async def forget(broker: JetStreamContext) -> None:
        await broker.delete_stream("p")
        await broker.delete_stream("q")

    server.do(forget)


@pytest.fixture
def reader(broker: Broker) -> Iterator[StreamReader]:
    reader = NatsReader(broker.url, ["p", "q"], timeout_s=LONG_S)
    yield reader
    reader.close()


def records(first: int, last: int, partition: str = "p") -> list[bytes]:
    return [f"{partition} {number}".encode() for number in range(first, last + 1)]


def test_every_record_of_every_partition_by_its_offset(
    broker: Broker, reader: StreamReader
) -> None:
    size = 2 * AT_ONCE + 5
    broker.write("p", records(1, size))
    broker.write("q", [*records(1, 3, "q"), b"", bytes(range(256))])
    assert reader.partitions() == ("p", "q")
    assert reader.ends() == {"p": size + 1, "q": 6}
    begin = reader.origin
    for _ in range(2):
        assert list(reader.read("p", begin, size + 1)) == records(1, size)
    assert list(reader.read("q", begin, 6)) == [*records(1, 3, "q"), b"", bytes(range(256))]
    assert list(reader.read("p", 100, 101)) == records(100, 100)
    assert list(reader.read("p", AT_ONCE, 2 * AT_ONCE)) == records(AT_ONCE, 2 * AT_ONCE - 1)
    assert list(reader.read("p", 7, 7)) == []


def test_a_reader_that_leaves_in_the_middle_disturbs_nobody(
    broker: Broker, reader: StreamReader
) -> None:
    broker.write("p", records(1, 2 * AT_ONCE))
    for _ in range(3):
        half = reader.read("p", 1, 2 * AT_ONCE + 1)
        assert next(half) == b"p 1"
        half.close()
    assert list(reader.read("p", 1, 4)) == records(1, 3)


def test_threads_read_together(broker: Broker, reader: StreamReader) -> None:
    broker.write("p", records(1, 300))
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda begin: list(reader.read("p", begin, begin + 30)), range(1, 271))
        assert list(found) == [records(begin, begin + 29) for begin in range(1, 271)]


def test_a_forked_child_reads_over_a_connection_of_its_own(
    broker: Broker, reader: StreamReader
) -> None:
    broker.write("p", records(1, 10))
    assert list(reader.read("p", 1, 11)) == records(1, 10)
    child = os.fork()
    if child == 0:
        os._exit(0 if list(reader.read("p", 1, 11)) == records(1, 10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(reader.read("p", 1, 11)) == records(1, 10)


# ---- a stream grows ------------------------------------------------------------------------------


def test_what_is_not_written_yet_is_waited_for(broker: Broker, reader: StreamReader) -> None:
    broker.write("p", records(1, 3))
    found = reader.read("p", 1, 6)
    with ThreadPoolExecutor(1) as threads:
        rest = threads.submit(list, found)
        broker.write("p", records(4, 5))
        assert rest.result(LONG_S) == records(1, 5)


def test_growth_is_told_as_soon_as_one_partition_is_there(
    broker: Broker, reader: StreamReader
) -> None:
    broker.write("p", records(1, 3))
    assert reader.wait_until({"p": 4}, LONG_S) == {"p": 4, "q": 1}
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(reader.wait_until, {"p": 100, "q": 4}, LONG_S * 10)
        broker.write("p", records(4, 6))
        broker.write("q", records(1, 2, "q"))
        broker.write("q", records(3, 3, "q"))
        assert waiting.result(LONG_S) == {"p": 7, "q": 4}


def test_a_quiet_stream_is_told_after_the_time(broker: Broker, reader: StreamReader) -> None:
    broker.write("p", records(1, 3))
    assert reader.wait_until({"p": 5, "q": 2}, timeout_s=0.2) == {"p": 4, "q": 1}


def test_the_end_of_a_stream_stays_when_its_records_go(
    broker: Broker, reader: StreamReader
) -> None:
    broker.write("p", records(1, 5))

    async def purge(broker: JetStreamContext) -> None:
        await broker.purge_stream("p")

    broker.do(purge)
    assert reader.ends()["p"] == 6
    broker.write("p", records(6, 6))
    assert list(reader.read("p", 6, 7)) == records(6, 6)


# ---- records that are gone -----------------------------------------------------------------------


def test_trimmed_records_are_named_and_never_passed_over(
    broker: Broker, reader: StreamReader
) -> None:
    """Prior art: a reader that is behind goes on silently with the oldest record there is."""
    broker.write("p", records(1, 20))

    async def trim(broker: JetStreamContext) -> None:
        await broker.purge_stream("p", seq=11)

    broker.do(trim)
    gone = "the records 5 to 10 of 'p' are gone: the broker has 10 records of it, from 11 to 20"
    with pytest.raises(StateError, match=gone):
        list(reader.read("p", 5, 15))
    assert list(reader.read("p", 11, 21)) == records(11, 20)


def test_a_hole_in_the_middle_is_named_too(broker: Broker, reader: StreamReader) -> None:
    broker.write("p", records(1, 20))

    async def cut(broker: JetStreamContext) -> None:
        await broker.delete_msg("p", 7)
        await broker.delete_msg("p", 8)

    broker.do(cut)
    with pytest.raises(StateError, match="the records 7 to 8 of 'p' are gone"):
        list(reader.read("p", 1, 21))
    with pytest.raises(StateError, match="the records 8 to 8 of 'p' are gone"):
        list(reader.read("p", 8, 9))


# ---- a broker that is away -----------------------------------------------------------------------


def test_the_same_bytes_after_a_restart_of_the_broker(broker: Broker, reader: StreamReader) -> None:
    broker.write("p", records(1, 2 * AT_ONCE))
    found = reader.read("p", 1, 2 * AT_ONCE + 1)
    before = [next(found) for _ in range(5)]
    broker.restart()
    assert [*before, *found] == records(1, 2 * AT_ONCE)
    assert list(reader.read("p", 1, 2 * AT_ONCE + 1)) == records(1, 2 * AT_ONCE)


def test_who_waits_goes_on_waiting_through_a_restart(broker: Broker, reader: StreamReader) -> None:
    broker.write("p", records(1, 3))
    with ThreadPoolExecutor(2) as threads:
        growth = threads.submit(reader.wait_until, {"p": 5}, LONG_S * 10)
        rest = threads.submit(list, reader.read("p", 3, 6))
        broker.restart()
        broker.write("p", records(4, 5))
        assert growth.result(LONG_S)["p"] >= 5
        assert rest.result(LONG_S) == records(3, 5)


def test_a_broker_that_does_not_come_back_is_waited_for_with_a_limit(broker: Broker) -> None:
    reader = NatsReader(broker.url, ["p"], timeout_s=1.0)
    broker.write("p", records(1, 3))
    assert reader.ends() == {"p": 4}
    broker.stop()
    try:
        with pytest.raises(TimedOutError, match=r"records 1 to 3 of 'p'.*127.0.0.1.*within 1 s"):
            list(reader.read("p", 1, 4))
        with pytest.raises(TimedOutError, match="the ends of p"):
            reader.ends()
        with pytest.raises(TimedOutError, match="the growth of p"):
            reader.wait_until({"p": 9}, 0.1)
        late = NatsReader(broker.url, ["p"], timeout_s=1.0)
        with pytest.raises(TimedOutError, match="the ends of p"):
            late.ends()
        late.close()
    finally:
        broker.start()
    patient = NatsReader(broker.url, ["p"], timeout_s=LONG_S)
    assert list(patient.read("p", 1, 4)) == records(1, 3)
    patient.close()
    reader.close()


def test_records_that_nobody_writes_are_waited_for_with_a_limit(broker: Broker) -> None:
    reader = NatsReader(broker.url, ["p"], timeout_s=1.0)
    with pytest.raises(TimedOutError, match=r"the records 1 to 2 of 'p'.* no answer"):
        list(reader.read("p", 1, 3))
    reader.close()


def test_a_partition_that_does_not_exist_is_a_mistake_at_once(broker: Broker) -> None:
    reader = NatsReader(broker.url, ["p", "unknown"], timeout_s=LONG_S)
    with pytest.raises(UsageError, match="there is no stream for the ends of p, unknown"):
        reader.ends()
    with pytest.raises(UsageError, match="the records 1 to 1 of 'unknown'"):
        list(reader.read("unknown", 1, 2))
    reader.close()
    reader.close()
    assert "holdfast-nats" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("streams", [[], ["p", "p"]])
def test_partitions_are_named_once(streams: list[str]) -> None:
    with pytest.raises(UsageError, match="each named once"):
        NatsReader("nats://127.0.0.1:1", streams)
