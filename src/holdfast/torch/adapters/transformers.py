# SPDX-License-Identifier: Apache-2.0
"""Flash checkpoints for the Trainer of transformers: `FlashTrainer` in place of `Trainer`.

Every step goes to memory. When the Trainer's own settings say that it is time to save, the step
also goes to storage, as `checkpoint-500` with the files that the Trainer itself would write:
`from_pretrained` and the plain Trainer's `resume_from_checkpoint` read them.

Weights and optimizer are copied from where they are into shared memory. The Trainer writes the
small files (settings, tokenizer, random states) into a temporary folder, and they are taken from
there.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.trainer_callback import ExportableState

from holdfast.client import report_step
from holdfast.model.errors import UsageError
from holdfast.torch import MEMORY, STORAGE, Checkpointer, Saved, Tier
from holdfast.torch.checkpoint.files import LoadedFiles
from holdfast.torch.checkpoint.images import Leaf, safetensors_image
from holdfast.torch.checkpoint.zip_image import memory_file

WEIGHTS = "model{suffix}.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"
TRAINER_STATE = "trainer_state.json"
SCALER = "scaler.pt"


class FlashTrainer(Trainer):
    """A Trainer whose checkpoints cost almost nothing and whose restarts resume from memory.

    `train(resume_from_checkpoint=True)` resumes the newest state that every rank can have, from
    memory, another node or storage, and starts from the beginning if there is none: a script needs
    no other line for restarts. `memory_every` is the number of steps from one memory checkpoint to
    the next; `flash` has further settings of holdfast.torch.Checkpointer (replicas, parity, ...).
    """

    def __init__(
        self,
        *arguments: Any,
        memory_every: int = 1,
        flash: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise UsageError(
                "FlashTrainer saves models that are whole on every rank; for DeepSpeed use "
                "DeepSpeedCheckpointer, for FSDP holdfast.torch.Checkpointer, in your own loop"
            )
        self._memory_every = memory_every
        self._settled_files: dict[str, bytes] | None = None
        self._resuming: LoadedFiles | None = None
        self._flash = Checkpointer(
            self.args.output_dir,
            pattern="checkpoint-{step}",
            keep=self._outdated,
            **{"slots": 3, **(flash or {})},
        )
        self.add_callback(_AfterEachStep(self))

    # ---- saving ---------------------------------------------------------------------------------

    def flash_save(self, to: Tier) -> Saved:
        """Save the step that was just finished. Every rank calls it."""
        if self._settled_files is None:
            self._settled_files = self._agreed(self._write_settled_files())
        return self._flash.save_files(
            self.state.global_step, self._own_files(), shared=self._common_files, to=to
        )

    def flash_is_due(self, step: int) -> bool:
        """Whether this step goes to memory."""
        return step % self._memory_every == 0

    def flash_wait(self, timeout_s: float = 600.0) -> int | None:
        """Wait until all saves to storage are done; returns the newest committed step."""
        return self._flash.wait(timeout_s)

    def flash_close(self) -> None:
        """End the background work of this process."""
        self._flash.close()

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Called by the Trainer when its settings say that it is time to save."""
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        if self.state.best_global_step:
            best = f"checkpoint-{self.state.best_global_step}"
            self.state.best_model_checkpoint = str(Path(self.args.output_dir, best))
        self.flash_save(STORAGE)

    def _load_best_model(self) -> None:
        self.flash_wait()
        super()._load_best_model()

    def _outdated(self, steps: Sequence[int]) -> Sequence[int]:
        """The committed steps that may go: the Trainer's own rule, which keeps the best one."""
        limit = self.args.save_total_limit
        if not limit or limit < 0:
            return ()
        best = self.state.best_global_step
        newest = steps[-1:]
        kept = [step for step in steps if step == best and step not in newest]
        # As in the Trainer, the newest is kept beside the best even if the limit is 1.
        room = max(1, limit - len(kept))
        return [step for step in steps[:-room] if step not in kept]

    def _common_files(self) -> dict[str, object]:
        """The files that are the same on every rank."""
        assert self._settled_files is not None
        files: dict[str, object] = {**self._settled_files, **self._weights()}
        if not self.args.save_only_model:
            files[OPTIMIZER] = self.optimizer.state_dict()
            files[SCHEDULER] = self.lr_scheduler.state_dict()
            scaler = getattr(self.accelerator, "scaler", None)
            if scaler is not None:
                files[SCALER] = scaler.state_dict()
        self._note_callbacks()
        with tempfile.TemporaryDirectory() as folder:
            self.state.save_to_json(str(Path(folder, TRAINER_STATE)))
            return files | _content(Path(folder))

    def _own_files(self) -> dict[str, object]:
        """The files of each rank: the states of its random generators."""
        if self.args.save_only_model:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            self._save_rng_state(folder)
            return dict(_content(Path(folder)))

    def _weights(self) -> dict[str, object]:
        """The weights as `save_pretrained` lays them out, described and not yet copied."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        state = dict(model.state_dict())
        if isinstance(model, PreTrainedModel):
            for key in model._keys_to_ignore_on_save or ():
                state.pop(key, None)
            state = remove_tied_weights_from_state_dict(state, model)
            state = revert_weight_conversion(model, state)
        split = split_torch_state_dict_into_shards(
            state, filename_pattern=WEIGHTS, max_shard_size="50GB"
        )
        files: dict[str, object] = {}
        for name, keys in split.filename_to_tensors.items():
            files[name], _ = safetensors_image(name, [Leaf(key, state[key]) for key in keys])
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            files[WEIGHTS_INDEX] = json.dumps(index, indent=2, sort_keys=True)
        return files

    def _note_callbacks(self) -> None:
        """Put the states of callbacks into the Trainer's state, as the Trainer does."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                known = self.state.stateful_callbacks[name]
                if isinstance(known, list):
                    known.append(state)
                else:
                    self.state.stateful_callbacks[name] = state

    def _write_settled_files(self) -> dict[str, bytes]:
        """The files that training does not change: settings, tokenizer. Only rank 0 writes them."""
        if not self.is_world_process_zero():
            return {}
        with tempfile.TemporaryDirectory() as folder:
            self._save(folder, state_dict={})
            return {
                name: content
                for name, content in _content(Path(folder)).items()
                if not name.endswith(".safetensors")
            }

    def _agreed(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """The files of rank 0, on every rank: each node keeps a whole checkpoint."""
        if self.args.world_size == 1:
            return files
        device = self.args.device if dist.get_backend() == "nccl" else torch.device("cpu")
        encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(files)), dtype=torch.uint8)
        length = torch.tensor([len(encoded)], device=device)
        dist.broadcast(length, src=0)
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
        if self.is_world_process_zero():
            data.copy_(encoded)
        dist.broadcast(data, src=0)
        return msgspec.msgpack.decode(data.cpu().numpy().tobytes(), type=dict[str, bytes])

    # ---- resuming -------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """As Trainer.train; True resumes from the nearest place that has the newest state."""
        if resume_from_checkpoint is not True:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **options)
        found = self._flash.load_files()
        if found is None:
            return super().train(**options)
        # The Trainer reads small files from a folder; large ones stay where they are.
        with tempfile.TemporaryDirectory() as folder:
            for name in found.names():
                Path(folder, name).write_bytes(b"" if _is_large(name) else found.file(name))
            if found.substitute:
                # Not this rank's random states: without a file, the Trainer keeps the present ones.
                for path in Path(folder).glob("rng_state*.pth"):
                    path.unlink()
            self._resuming = found
            try:
                return super().train(resume_from_checkpoint=folder, **options)
            finally:
                self.flash_resumed()

    def flash_resumed(self) -> None:
        """Everything has been read: the slots may be used again."""
        if self._resuming is not None:
            self._resuming.close()
            self._resuming = None

    def _load_from_checkpoint(self, checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if self._resuming is None:
            super()._load_from_checkpoint(checkpoint, model)
            return
        state: dict[str, torch.Tensor] = {}
        for name in self._resuming.names():
            if name.endswith(".safetensors"):
                state |= safetensors.torch.load(bytes(self._resuming.file(name)))
        result = (model or self.model).load_state_dict(state, strict=False)
        self._issue_warnings_after_load(result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resuming is None or OPTIMIZER not in self._resuming.names():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        for name, target in ((OPTIMIZER, self.optimizer), (SCHEDULER, self.lr_scheduler)):
            file = memory_file(self._resuming.file(name))
            target.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


class _AfterEachStep(TrainerCallback):
    """Saves to memory after a step, unless the Trainer is about to save to storage anyway."""

    def __init__(self, trainer: FlashTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._trainer.flash_resumed()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        report_step(state.global_step, state.max_steps)
        if not control.should_save and self._trainer.flash_is_due(state.global_step):
            self._trainer.flash_save(MEMORY)


def _is_large(name: str) -> bool:
    return name == OPTIMIZER or name.endswith(".safetensors")


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
