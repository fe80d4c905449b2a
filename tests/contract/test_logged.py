# SPDX-License-Identifier: Apache-2.0
"""The error that ends a process is in its log."""

from pathlib import Path

import pytest

from holdfast.cli.logged import errors_in
from holdfast.model.errors import StateError
from holdfast.runtime.log_file import LogFile


def test_an_error_of_ours_is_its_sentence_and_another_has_its_traceback(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    with pytest.raises(StateError), errors_in(log):
        raise StateError("the disk is full")
    with pytest.raises(KeyError), errors_in(log):
        raise KeyError("a broken invariant")
    log.close()
    first, *rest = (tmp_path / "log").read_text().splitlines()
    assert first.endswith(" ERROR the disk is full")
    assert "Traceback" in rest[0]
    assert rest[-1].strip() == "KeyError: 'a broken invariant'"
