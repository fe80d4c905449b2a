# SPDX-License-Identifier: Apache-2.0
"""A manifest is read with suspicion: it may name files that are not its own."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.checkpoint.manifest import MANIFEST, decode_manifest, encode_manifest, list_committed
from holdfast.checkpoint.storage import open_storage
from holdfast.model.checkpoint import Series, Version
from holdfast.model.errors import StateError
from tests.storages import make_state, save

V1, V2 = Version(1, 100), Version(1, 101)
PATTERNS = (
    *("step-{step:010d}", "global_step{step}", "{step}", "v2{step}", "{step}0", "{step}{step:03d}"),
    *("{name}a-{step:03d}.{step}", "best"),
)
ELSEWHERE = ("../x", "/etc/passwd", "a/../../x", "./x", "a//b", "..", "", MANIFEST)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_manifest_that_names_a_file_elsewhere_is_not_believed(tmp_path: Path, name: str) -> None:
    """Its checksum fits: whoever wrote it knew how."""
    series = Series(f"{tmp_path}/ckpt")
    storage = open_storage(series.directory)
    save(storage, series, V1, make_state(1), "a1", tmp_path)
    save(storage, series, V2, make_state(2), "a2", tmp_path)
    path = f"{series.name(V2.step)}/{MANIFEST}"
    raw = storage.get(path)
    assert raw is not None
    honest = decode_manifest(raw, path)
    first, *rest = honest.files
    forged = encode_manifest(replace(honest, files=(replace(first, name=name), *rest)))
    with pytest.raises(StateError):
        decode_manifest(forged, path)
    storage.put(path, forged)
    problems: list[str] = []
    found = list_committed(storage, series, problems.append)
    assert [one.version for one in found] == [V1]
    assert len(problems) == 1


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_name_tells_its_step(pattern: str) -> None:
    """Or a checkpoint would be passed over."""
    series = Series("/checkpoints", pattern=pattern)
    for step in (0, 2, 20, 200, 1234567, 2**63 - 1):
        found = series.step_of(series.name(step))
        assert found is not None
        assert series.name(found) == series.name(step)
        if "{step}{" not in pattern and "{step" in pattern:
            assert found == step
    for other in ("", "lost+found", "tmp-12", "step-", "global_step", "step-x1", "a-001.2"):
        assert series.step_of(other) is None
