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
