# SPDX-License-Identifier: Apache-2.0
"""From a directory's name to the storage that it is on."""

from holdfast.checkpoint.objects import ObjectStorage
from holdfast.checkpoint.posix import PosixStorage
from holdfast.checkpoint.storage_port import Storage
from holdfast.model.errors import UsageError


def open_storage(url: str) -> Storage:
    """The storage of a series' directory: an absolute path, or a URL that fsspec knows."""
    if url.startswith("file://"):
        url = url.removeprefix("file://")
    if "://" in url:
        return ObjectStorage(url)
    if not url.startswith("/"):
        raise UsageError(f"the checkpoint directory must be an absolute path or a URL, not {url!r}")
    return PosixStorage(url)
