# SPDX-License-Identifier: Apache-2.0
"""The log files of agents and masters: levels, rotation, and disks that fail or do not answer."""

import io
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.core.job import events as ev
from holdfast.model.errors import StateError
from holdfast.protocol import messages as m
from holdfast.runtime.log_file import BACKLOG_MAX, LogFile
from holdfast.runtime.observe import Details, Level, sayer
from tests.waiting import until


def lines_of(path: Path) -> list[str]:
    """The lines without their date."""
    return [line.split(" ", 2)[2] for line in path.read_text().splitlines()]


def test_a_line_has_date_level_and_speaker(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "agent.log")
    say = sayer("node 3", lambda line: None, file=log)
    say("the stream broke", Level.WARNING)
    log.close()
    (line,) = (tmp_path / "agent.log").read_text().splitlines()
    date, time, text = line.split(" ", 2)
    assert (len(date), len(time), date[4], time[8]) == (10, 12, "-", ".")
    assert text == "WARNING node 3: the stream broke"


@pytest.mark.parametrize(
    ("least", "with_file", "shown", "kept"),
    [
        (Level.DEBUG, True, ["info", "warning", "error"], ["debug", "info", "warning", "error"]),
        (Level.INFO, True, ["info", "warning", "error"], ["info", "warning", "error"]),
        (Level.WARNING, True, ["warning", "error"], ["info", "warning", "error"]),
        (Level.ERROR, True, ["error"], ["info", "warning", "error"]),
        (Level.DEBUG, False, ["debug", "info", "warning", "error"], []),
        (Level.ERROR, False, ["error"], []),
    ],
)
def test_a_terminal_has_no_details_and_a_file_no_gaps(
    tmp_path: Path, least: Level, with_file: bool, shown: list[str], kept: list[str]
) -> None:
    terminal: list[str] = []
    log = LogFile(tmp_path / "log") if with_file else None
    say = sayer("x", lambda line: terminal.append(line.decode()), least=least, file=log)
    for level in Level:
        say(level.name.lower(), level)
    if log is not None:
        log.close()
        assert [line.split(": ")[1] for line in lines_of(tmp_path / "log")] == kept
    assert [line.split(": ")[1].strip() for line in terminal] == shown


def test_details_name_plain_fields_and_leave_out_what_is_long_or_may_be_a_key() -> None:
    rules = m.JobRules(
        min_nodes=1, max_nodes=1, node_unit=1, last_call_s=1, join_timeout_s=1, max_restarts=3
    )
    attach = m.Attach(agent_key="SECRET", rules=rules, nproc=2, host="a", store_port=1)
    assert str(Details(ev.AttachRequested(1, 2, attach))) == (
        "AttachRequested link=1 call=2 attach=Attach"
    )
    long = ev.StopRequested(1, 2, "x" * 1000)
    assert str(Details(long)) == "StopRequested link=1 call=2 reason=... stopped=0"


def test_no_text_forges_a_record_or_commands_a_terminal(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    log("it failed\n2026-01-01 00:00:00.000 INFO master: all is well\r\x1b[2Jgone\tübrig")
    log("next")
    log.close()
    first, second, third, last = (tmp_path / "log").read_text().splitlines()
    assert first.endswith(" INFO it failed")
    assert second == "    2026-01-01 00:00:00.000 INFO master: all is well"
    assert third == "    \\x1b[2Jgone\tübrig"
    assert last.endswith(" INFO next")


def test_a_full_file_is_turned_over_and_the_oldest_goes(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log", bytes_max=2000, kept=2)
    for number in range(200):
        log(f"line {number}")
    log.close()
    files = [tmp_path / "log.2", tmp_path / "log.1", tmp_path / "log"]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(path.stat().st_size <= 2000 for path in files)
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * 3
    numbers = [int(line.split()[-1]) for path in files for line in lines_of(path)]
    assert numbers == list(range(numbers[0], 200))


def test_the_next_process_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for name in ("first", "second"):
        log = LogFile(tmp_path / "master.log")
        log(name)
        log.close()
    assert lines_of(tmp_path / "master.log") == ["INFO first", "INFO second"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "precious")
    with pytest.raises(StateError, match="is a link"):
        LogFile(tmp_path / "log")
    assert not (tmp_path / "precious").exists()


def test_a_disk_that_fails_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogFile(Path("/dev/full"))
    for _ in range(3):
        log("nobody will read this")
    log.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "/dev/full" in said
    assert "No space left on device" in said


def test_a_disk_that_does_not_answer_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A pipe whose reader does not read: after 64 KiB each write of it blocks."""
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    log = LogFile(tmp_path / "log")
    for number in range(3 * BACKLOG_MAX):
        log(f"line {number}")  # The test would hang here.
    os.set_blocking(reader, True)
    text = b""
    while text.count(b"\n") < BACKLOG_MAX // 2:
        text += os.read(reader, 65536)
    log("the disk answers again")
    while b"the disk answers again" not in text:
        text += os.read(reader, 65536)
    os.close(reader)
    log.close()
    assert b"lines are missing here: the disk was too slow" in text


def test_a_late_file_that_cannot_be_opened_is_said_once_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    folder.touch()  # Not a folder.
    with pytest.raises(FileExistsError):
        LogFile(folder / "log")
    first = LogFile(folder / "log", late=True)
    first("lost")
    first("lost too")
    first.close()
    assert capsys.readouterr().err.count(f"the log {folder}/log is not written") == 1
    folder.unlink()
    second = LogFile(folder / "log", late=True)
    second("kept")
    second.close()
    assert lines_of(folder / "log") == ["INFO kept"]


def test_a_late_file_of_somebody_else_stops_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "precious")
    log = LogFile(tmp_path / "log", late=True)
    log("never there")
    log.close()
    assert "is a link" in capsys.readouterr().err
    assert not (tmp_path / "precious").exists()


def test_a_late_file_on_a_disk_that_does_not_answer_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A pipe that nobody reads: to open it blocks."""
    os.mkfifo(tmp_path / "log")
    log = LogFile(tmp_path / "log", late=True)
    log("the test would hang here")
    reader = os.open(tmp_path / "log", os.O_RDONLY)
    with os.fdopen(reader) as pipe:
        assert pipe.readline().endswith("INFO the test would hang here\n")
        log.close()


def test_what_a_disk_was_too_slow_for_is_counted_at_the_end_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    log = LogFile(tmp_path / "log")
    for number in range(3 * BACKLOG_MAX):
        log(f"line {number}")
    os.set_blocking(reader, True)
    closing = threading.Thread(target=log.close)
    closing.start()
    with os.fdopen(reader) as pipe:
        lines = pipe.readlines()
    closing.join()
    assert "lines are missing here: the disk was too slow" in lines[-1]
    notes = [line for line in lines if " WARNING " in line]
    missing = sum(int(note.split()[3]) for note in notes)
    assert len(lines) - len(notes) + missing == 3 * BACKLOG_MAX


def test_bytes_that_are_no_text_cost_no_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, terminal = LogFile(tmp_path / "log"), list[bytes]()
    sayer("x", terminal.append, file=log)("no file a\udc80b")
    log.close()
    assert lines_of(tmp_path / "log") == [r"INFO x: no file a\udc80b"]
    assert terminal[0].endswith(b"x: no file a\\udc80b\n")
    assert not capsys.readouterr().err


def test_a_file_that_cannot_be_rotated_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.1").mkdir()  # Nothing can be renamed to it.
    log = LogFile(tmp_path / "log", bytes_max=500, kept=1)
    for number in range(50):
        log(f"line {number}")
    log.close()
    assert [line.split()[-1] for line in lines_of(tmp_path / "log")] == list(map(str, range(50)))
    assert capsys.readouterr().err.count("cannot be rotated") == 1


def test_a_file_that_fails_is_opened_anew_for_the_next_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe whose reader has gone, and then a file."""
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    log = LogFile(tmp_path / "log")
    os.close(reader)
    log("lost")
    until(lambda: "is not written" in capsys.readouterr().err, 120)
    (tmp_path / "log").unlink()
    log("kept")
    log.close()
    missing, kept = lines_of(tmp_path / "log")
    assert missing.startswith("WARNING 1 lines are missing here: ")
    assert "Broken pipe" in missing
    assert kept == "INFO kept"


STUCK = """
import sys
from pathlib import Path
from holdfast.runtime.log_file import LogFile
log = LogFile(Path(sys.argv[1]))
for number in range(3000):
    log(f"line {number}")
log.close()
print("closed", flush=True)
"""


def test_a_disk_that_does_not_answer_lets_the_process_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    try:
        argv = [sys.executable, "-c", STUCK, str(tmp_path / "log")]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    finally:
        os.close(reader)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "closed\n", "")


class Broken(io.TextIOBase):
    """Standard error whose reader has gone."""

    def __init__(self) -> None:
        self.was_tried = threading.Event()

    def write(self, text: str, /) -> int:
        self.was_tried.set()
        raise BrokenPipeError


def test_a_standard_error_that_fails_too_ends_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "logs"
    folder.touch()  # Not a folder.
    broken = Broken()
    monkeypatch.setattr(sys, "stderr", broken)
    log = LogFile(folder / "log", late=True)
    log("lost")
    assert broken.was_tried.wait(120)
    folder.unlink()
    log("kept")
    log.close()
    assert lines_of(folder / "log")[-1] == "INFO kept"
