# SPDX-License-Identifier: Apache-2.0
"""`make test-times` names what is dear in a run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def times(report: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "test_times.py"), str(report)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_pytest_reports_is_added_up(tmp_path: Path) -> None:
    (tmp_path / "test_quick.py").write_text("def test_one():\n    pass\n")
    (tmp_path / "test_other.py").write_text("def test_a():\n    pass\ndef test_b():\n    pass\n")
    report = tmp_path / "report.xml"
    words = ["-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words, "-c", "/dev/null", str(tmp_path)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        timeout=120,
        check=True,
    )
    done = times(report)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 tests in 2 files take ")
    assert "test_other.py::test_b" in done.stdout


def test_the_dearest_come_first_and_no_more_than_can_be_read(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = [
        f'<testcase file="tests/test_{n % 15:02}.py" name="test_{n}" time="{n}.0" />'
        for n in range(45)
    ]
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    lines = times(report).stdout.splitlines()
    assert lines[0] == "45 tests in 15 files take 990 s of all workers together."
    assert lines[1] == "The 10 dearest files:"
    assert lines[2].split() == ["87.0", "s", "9", "%", "tests/test_14.py"]
    assert lines[12] == "The 20 dearest tests:"
    assert lines[13].split() == ["44.0", "s", "4", "%", "tests/test_14.py::test_44"]
    assert len(lines) == 33


def test_something_else_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for report in ("empty", "missing"):
        done = times(tmp_path / report)
        assert done.returncode == 2
        assert done.stderr.startswith("test_times: ")
        assert "is no report of a run" in done.stderr
        assert "Traceback" not in done.stderr
