# SPDX-License-Identifier: Apache-2.0
"""The switch that writes the golden files anew."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/contract/kubernetes --rewrite-pods`: the diff is what users' clusters get."""
    parser.addoption(
        "--rewrite-pods",
        action="store_true",
        default=False,
        help="replace the golden pods by those of today",
    )
