# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a framework's own files: Holdfast keeps them, the framework reads them."""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from holdfast.model.checkpoint import SHARED, Shape, rank_part
from holdfast.model.errors import StateError
from holdfast.torch.checkpoint.images import Image, bytes_image
from holdfast.torch.checkpoint.restore import OpenPart, Parts
from holdfast.torch.checkpoint.zip_image import zip_image

Files = Mapping[str, object] | Callable[[], Mapping[str, object]]
"""Content by file name, or a function that makes it."""


def to_images(files: Files) -> list[Image]:
    """The files, described."""
    made = files() if callable(files) else files
    return [to_image(name, value) for name, value in made.items()]


def to_image(name: str, value: object) -> Image:
    """A file with this content: an image, bytes, text, or any value that torch.save takes."""
    if isinstance(value, Image):
        return value
    if isinstance(value, bytes):
        return bytes_image(name, value)
    if isinstance(value, str):
        return bytes_image(name, value.encode())
    return zip_image(name, value)


class LoadedFiles:
    """The files of a checkpoint that every rank has agreed on. Close it when they are read."""

    def __init__(self, parts: Parts, opened: dict[str, OpenPart]) -> None:
        self.step = parts.version.step
        self.shape: Shape = parts.shape
        """Its world size is that of the world that saved."""
        own = opened.get(rank_part(parts.rank))
        self.substitute = own is None or own.part != own.asked
        """Whether the rank's own files are another rank's, or none."""
        self._parts = parts
        self._files = {name: part for part in opened.values() for name in part.names()}

    def names(self) -> list[str]:
        """All files that can be read here."""
        return list(self._files)

    def file(self, name: str) -> memoryview:
        """The bytes of a file, read only; no object may refer to them after `close`."""
        if name not in self._files:
            raise StateError(f"the checkpoint of step {self.step} has no file {name} here")
        return self._files[name].file(name)

    def open(self, part: str) -> OpenPart:
        """One more part. It may fail, though all ranks agreed: better ask in `load_files`."""
        return self._parts.open([part])[part]

    def close(self) -> None:
        """The files have been read. StateError: their bytes changed before that.

        The caller reads them in place, so they are compared when no caller reads them any more.
        """
        try:
            self._parts.take()
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Close it without comparing the bytes: they are not used."""
        self._files = {}
        self._parts.close()

    def __enter__(self) -> "LoadedFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.let_go()


class FilesLoading:
    """Gets files ready; the caller reads them."""

    def __init__(self, more: Sequence[str]) -> None:
        self._more = more
        self._opened: dict[str, OpenPart] = {}

    def prepare(self, parts: Parts) -> None:
        """Open this rank's part, the shared one, and the other requested parts."""
        own = rank_part(parts.rank)
        wanted = list(self._more)
        if parts.shape.shared:
            wanted += [SHARED, own]
        elif parts.rank < parts.shape.world_size:
            wanted.append(own)
        self._opened = parts.open(list(dict.fromkeys(wanted)))

    def take(self) -> None:
        """Nothing is copied: the caller reads the files in place, see `LoadedFiles`."""

    def fill(self) -> dict[str, object]:
        """Nothing to fill: there are no live objects here."""
        return {}

    def files(self, parts: Parts) -> LoadedFiles:
        """The opened files."""
        return LoadedFiles(parts, self._opened)
