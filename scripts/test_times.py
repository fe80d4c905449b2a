# SPDX-License-Identifier: Apache-2.0
"""Says where the time of a run of the suite goes: its dearest files, and its dearest tests.

    pytest -o junit_family=xunit1 --junitxml=FILE ...; python scripts/test_times.py FILE

`make test-times` does both. The seconds are those that a worker of pytest-xdist spends on a test
with its set-up, so they grow with what else runs on the machine: compare runs of the same machine.
"""

import argparse
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FILES = 10
TESTS = 20


def times(report: Path) -> tuple[Counter[str], Counter[str]]:
    """The seconds of each file, and of each test."""
    files, tests = Counter[str](), Counter[str]()
    for case in xml.parse(report).iter("testcase"):
        seconds, file = float(case.get("time", 0)), case.get("file", case.get("classname", "?"))
        files[file] += seconds
        tests[f"{file}::{case.get('name')}"] += seconds
    return files, tests


def said(report: Path) -> Iterator[str]:
    files, tests = times(report)
    total = sum(files.values())
    yield f"{len(tests)} tests in {len(files)} files take {total:.0f} s of all workers together."
    for what, found, count in (("files", files, FILES), ("tests", tests, TESTS)):
        yield f"The {min(count, len(found))} dearest {what}:"
        for name, seconds in found.most_common(count):
            yield f"{seconds:8.1f} s {100 * seconds / (total or 1):4.0f} %  {name}"


def main() -> int:
    parser = argparse.ArgumentParser(description="say where the time of a run of the suite goes")
    parser.add_argument("report", type=Path, help="what pytest --junitxml wrote")
    report = parser.parse_args().report
    try:
        print("\n".join(said(report)))
    except (OSError, xml.ParseError) as error:
        print(f"test_times: {report} is no report of a run: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
