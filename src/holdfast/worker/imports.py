# SPDX-License-Identifier: Apache-2.0
"""Watches what a worker imports, so that the next worker finds it already imported.

What a program needs is learned from the program itself, lazy imports in the middle of a training
step included; nothing is configured.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

_STDLIB = os.path.dirname(os.path.realpath(os.__file__)) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_installed(file: str) -> bool:
    """Whether a file belongs to the interpreter or to an installed package."""
    return file.startswith(_STDLIB) or any(folder in file for folder in _INSTALLED)


class ImportObserver:
    """A finder that stands before all others, asks them, and notes what they found.

    Modules under an excluded root are the user's own code. They are never noted and so never
    preloaded: what runs is always what is on disk now.
    """

    def __init__(
        self,
        *,
        note: Callable[[str], None],
        excluded_roots: Sequence[str],
        after_import: Mapping[str, Callable[[ModuleType], None]],
    ) -> None:
        self._note = note
        self._excluded = tuple(os.path.join(os.path.realpath(r), "") for r in excluded_roots)
        self._after_import = after_import

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec the finders behind this one give. Noted here, before the module runs, because
        an outer module has to be imported before its inner ones when the list is replayed."""
        finders = sys.meta_path
        for finder in finders[finders.index(self) + 1 :]:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(name, path, target) if find_spec else None
            if spec is not None:
                is_file = spec.has_location and spec.origin and self._may_preload(spec.origin)
                if is_file and not _is_looked_up():
                    self._note(name)
                if name in self._after_import:
                    _run_after(spec, self._after_import[name])
                return spec
        return None

    def _may_preload(self, file: str) -> bool:
        file = os.path.realpath(file) if self._excluded else file
        return is_installed(file) or not file.startswith(self._excluded)


def _is_looked_up() -> bool:
    """Whether the caller of the finder only asks where a module is, and does not import it.

    torch does so with pandas, which is large and starts a thread when it is imported.
    """
    caller: FrameType | None = sys._getframe(1)
    for _ in range(2):  # From the finder to importlib's own search, and to the caller of that.
        caller = caller and caller.f_back
    return caller is not None and caller.f_globals.get("__name__") == "importlib.util"


def _run_after(spec: ModuleSpec, action: Callable[[ModuleType], None]) -> None:
    """Call `action` once the module has been executed; the loader stays the real one."""
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.__dict__["exec_module"]
        execute(module)
        action(module)

    loader.__dict__["exec_module"] = exec_module


def observe(
    *,
    note: Callable[[str], None],
    excluded_roots: Sequence[str],
    after_import: Mapping[str, Callable[[ModuleType], None]],
) -> None:
    """Start observing. Actions for modules that are loaded already run at once."""
    for name, action in after_import.items():
        if name in sys.modules:
            action(sys.modules[name])
    observer = ImportObserver(note=note, excluded_roots=excluded_roots, after_import=after_import)
    sys.meta_path.insert(0, observer)


class NameSender:
    """Sends module names down a non-blocking descriptor, one line each, and never disturbs the
    program: a reader that is gone or slow costs us a name, nothing else."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self, name: str) -> None:
        try:
            os.write(self._fd, f"{name}\n".encode())
        except BlockingIOError:
            pass
        except OSError:
            # The program closed the descriptor or the agent is gone; nothing is learned any more,
            # and a number that may be reused by the program must not be written to again.
            self._fd = -1
