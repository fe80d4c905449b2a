# SPDX-License-Identifier: Apache-2.0
"""The switch that writes golden bytes, for new messages and before the first release."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/wire --rewrite-golden`: a changed line is one that old peers misunderstand."""
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        default=False,
        help="replace the golden bytes by those of today",
    )
