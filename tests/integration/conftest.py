# SPDX-License-Identifier: Apache-2.0
"""What the tests with real processes share."""

from collections.abc import Iterator

import pytest

from tests.integration.jobs import Jobs, playground


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    """A place to start whole jobs in; see tests/integration/jobs.py."""
    with playground() as jobs:
        yield jobs
