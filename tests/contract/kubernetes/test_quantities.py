# SPDX-License-Identifier: Apache-2.0
"""Amounts of cpu and memory in every form that Kubernetes has."""

import pytest

from holdfast.platforms.kubernetes.quantities import amount, mib, milli, whole


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("8", 8000),
        (8, 8000),
        (0.5, 500),
        ("0.5", 500),
        (".5", 500),
        ("1.", 1000),
        ("500m", 500),
        ("1e3", 1_000_000),
        ("2E-1", 200),
        ("100u", 1),
        ("1n", 1),
        ("1k", 1_000_000),
        ("0", 0),
        (" 2 ", 2000),
    ],
)
def test_cpu_in_thousandths_of_a_core(written: object, expected: int) -> None:
    assert milli(written) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("16Gi", 16384),
        ("1Ki", 1),
        ("512Mi", 512),
        ("1Ti", 1 << 20),
        ("1Pi", 1 << 30),
        ("1Ei", 1 << 40),
        ("1.5Gi", 1536),
        ("1G", 954),
        ("1M", 1),
        ("1000k", 1),
        ("1T", 953675),
        ("1P", 953674317),
        ("1E", 953674316407),
        ("1e9", 954),
        (1 << 30, 1024),
        ("1048577", 2),
        ("128974848000m", 123),
    ],
)
def test_memory_in_mib_rounded_up(written: object, expected: int) -> None:
    assert mib(written) == expected


@pytest.mark.parametrize(
    "written",
    [
        "",
        "lots",
        "16GB",
        "16 Gi",
        "16gi",
        "1K",
        "0x10",
        "1e",
        "--1",
        "٣",
        True,
        None,
        [],
        {},
        "1e9999",
    ],
)
def test_anything_else_is_no_amount(written: object) -> None:
    assert amount(written) is None
    assert milli(written) is None


def test_less_than_nothing_is_no_amount_of_anything() -> None:
    assert milli("-1") is None
    assert mib(-5) is None
    assert whole("8") == 8
