# SPDX-License-Identifier: Apache-2.0
"""The switch that writes the output of today's core into the scenario files."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/scenarios --rewrite-scenarios`, then read the difference like code."""
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        default=False,
        help="replace the expected output of every scenario by what comes out now",
    )
