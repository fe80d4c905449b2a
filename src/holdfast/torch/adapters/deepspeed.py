# SPDX-License-Identifier: Apache-2.0
"""Flash checkpoints for a DeepSpeed engine, ZeRO 0 to 3, in DeepSpeed's own files.

DeepSpeed decides what each rank saves and under which name. It hands every file to the checkpoint
engine of the training engine. During a save or a load Holdfast puts its own checkpoint engine on
this one object. It replaces nothing else in the process, and always puts the old one back.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine

from holdfast.model.checkpoint import rank_part
from holdfast.model.errors import StateError, UsageError
from holdfast.torch import Checkpointer, Saved, Tier
from holdfast.torch.checkpoint.files import LoadedFiles
from holdfast.torch.checkpoint.zip_image import memory_file


@dataclass(frozen=True, slots=True)
class Restored:
    """What was loaded into the engine."""

    step: int
    client_state: dict[str, Any]


class DeepSpeedCheckpointer:
    """Saves and loads the state of one engine. All ranks call the same methods in the same order.

    `tag` is the pattern of a checkpoint's directory name and must contain {step}. All further
    settings are those of holdfast.torch.Checkpointer.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        directory: str | os.PathLike[str],
        *,
        tag: str = "global_step{step}",
        **settings: Any,
    ) -> None:
        if tag.format(step=1) == tag.format(step=2):
            raise UsageError(
                f"the tag {tag!r} is the same for every step: it needs {{step}}, as in "
                "'global_step{step}'"
            )
        self._engine = engine
        self._tag = tag
        self._files = Checkpointer(directory, pattern=tag, tracker="latest", **settings)

    def save(
        self,
        step: int | None = None,
        client_state: Mapping[str, Any] | None = None,
        to: Tier | None = None,
    ) -> Saved:
        """Save the engine's state; the step is the engine's own count unless it is given.

        `latest` names the checkpoint only when it is whole on storage.
        """
        number = self._engine.global_steps if step is None else step
        return self._files.save_files(
            number, lambda: self._gathered(number, dict(client_state or {})), to=to
        )

    def load(self, step: int | None = None, **options: Any) -> Restored | None:
        """Load the newest state that every rank can have, or that of one step; None: there is none.

        The options are those of DeepSpeed's load_checkpoint.
        """
        # Of the ranks with the same weights, DeepSpeed lets the first one write them.
        writer = dist.get_global_rank(self._engine.seq_data_parallel_group, 0)
        found = self._files.load_files(step, parts=(rank_part(writer),))
        if found is None:
            return None
        with found:
            return self._read(found, options)

    def wait(self, timeout_s: float = 600.0) -> int | None:
        """Wait until all saves to storage are done; returns the newest committed step."""
        return self._files.wait(timeout_s)

    def close(self) -> None:
        self._files.close()

    def _gathered(self, step: int, client_state: dict[str, Any]) -> dict[str, object]:
        """What DeepSpeed saves on this rank: live objects by file name."""
        gathering = _Gathering()
        with tempfile.TemporaryDirectory() as folder, self._through(gathering):
            # DeepSpeed itself writes only its recovery scripts into the folder.
            self._engine.save_checkpoint(
                folder, tag=self._tag.format(step=step), client_state=client_state
            )
        return gathering.files

    def _read(self, found: LoadedFiles, options: dict[str, Any]) -> Restored:
        tag = self._tag.format(step=found.step)
        with tempfile.TemporaryDirectory() as folder, self._through(_Reading(found)):
            # DeepSpeed looks for names before it asks its checkpoint engine for the content.
            for name in found.names():
                path = Path(folder, tag, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            path, client_state = self._engine.load_checkpoint(folder, tag=tag, **options)
        if path is None:
            raise StateError(f"DeepSpeed does not find its files in the checkpoint {tag!r}")
        return Restored(found.step, client_state)

    @contextmanager
    def _through(self, ours: TorchCheckpointEngine) -> Iterator[None]:
        theirs = self._engine.checkpoint_engine
        self._engine.checkpoint_engine = ours
        try:
            yield
        finally:
            self._engine.checkpoint_engine = theirs


class _Gathering(TorchCheckpointEngine):
    """Keeps the files that DeepSpeed would write."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, object] = {}
        self._folder = ""

    def create(self, info: CheckpointCommitInfo) -> None:
        self._folder = os.path.join(info.save_dir, info.tag)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing to do: no file is written there."""

    def save(self, state_dict: object, path: str) -> None:
        self.files[os.path.relpath(path, self._folder)] = state_dict

    def is_decoupled(self) -> bool:
        """True, so that DeepSpeed does not write `latest`: it would do so before all is written."""
        return True


class _Reading(TorchCheckpointEngine):
    """Gives DeepSpeed its files from memory; DeepSpeed unpickles them as it always does."""

    def __init__(self, found: LoadedFiles) -> None:
        super().__init__()
        self._found = found

    def load(self, path: str, map_location: Any = None) -> Any:
        known = [name for name in self._found.names() if path.endswith(f"/{name}")]
        if not known:
            raise StateError(f"DeepSpeed asks for {path}, which this rank did not open")
        return super().load(memory_file(self._found.file(known[0])), map_location)
