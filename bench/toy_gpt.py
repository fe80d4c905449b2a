# SPDX-License-Identifier: Apache-2.0
"""A GPT-like model with Adam of about 2 or 4 GB, and the raw copy that no checkpoint can beat."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 1600
HEADS = 25
VOCABULARY = 50257
SIZES = {"tiny": (2, 64), "2g": (5, 4), "4g": (10, 2)}
"""Blocks, and which part of GPT-2's vocabulary: with Adam 0.75, 2.1 and 4.2 GB."""

PIECE_BYTES = 16 * 2**20
WINDOW_BYTES = 2**30
"""The raw copy goes round and round in so much memory: far more than any cache, and 4 GB fit."""

TOKENS = 256
"""Few for a training, and enough that the step computes most of the time, as trainings do. With 32
it waits for memory most of the time."""


class Block(nn.Module):
    """A transformer block with GPT-2 XL's shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        parts = self.attention(self.before_attention(hidden)).chunk(3, -1)
        query, key, value = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        wide: Tensor = self.narrow(functional.gelu(self.widen(self.before_mlp(hidden))))
        return hidden + wide


class Gpt(nn.Module):
    """Blocks between an embedding and its transpose."""

    def __init__(self, size: str) -> None:
        super().__init__()
        blocks, share = SIZES[size]
        self.tokens = nn.Embedding(VOCABULARY // share, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, text: Tensor, after_block: Callable[[], None] = lambda: None) -> Tensor:
        hidden: Tensor = self.tokens(text)
        for block in self.blocks:
            hidden = block(hidden)
            after_block()
        return functional.linear(hidden, self.tokens.weight)


def build(size: str) -> tuple[Gpt, torch.optim.Adam]:
    """The model and its optimizer, with the optimizer's state in place."""
    torch.manual_seed(3)
    model = Gpt(size)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def train_step(model: Gpt, optimizer: torch.optim.Adam) -> list[float]:
    """One real step. How long its pieces took: forward and backward pass together, the update."""
    times = [time.perf_counter()]
    loss = _forward(model)
    optimizer.zero_grad(set_to_none=False)  # New memory at every step would drown the difference.
    loss.backward()  # type: ignore[no-untyped-call]
    times.append(time.perf_counter())
    optimizer.step()
    times.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(times)]


def forward_pass(model: Gpt) -> list[float]:
    """The first part of a step; how long each of its blocks took."""
    times = [time.perf_counter()]
    _forward(model, lambda: times.append(time.perf_counter()))
    return [end - begin for begin, end in itertools.pairwise(times)]


def _forward(model: Gpt, after_block: Callable[[], None] = lambda: None) -> Tensor:
    text = torch.randint(model.tokens.num_embeddings, (1, TOKENS + 1))
    predicted = model(text[:, :-1], after_block)
    return functional.cross_entropy(predicted.flatten(0, 1), text[:, 1:].flatten())


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor of the state."""
    found = [tensor.detach() for tensor in model.state_dict().values()]
    for entry in optimizer.state.values():
        found += [value for value in entry.values() if isinstance(value, Tensor)]
    return found


class RawCopy:
    """Plain memcpy between the state and pre-faulted shared memory, by two threads: the limit."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._memory = mmap.mmap(-1, WINDOW_BYTES)  # Shared and anonymous: tmpfs pages.
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(base, 1, WINDOW_BYTES)
        self._pieces: list[tuple[int, int, int]] = []
        at = 0
        for tensor in tensors:
            for start in range(0, tensor.nbytes, PIECE_BYTES):
                length = min(PIECE_BYTES, tensor.nbytes - start)
                at = at if at + length <= WINDOW_BYTES else 0
                self._pieces.append((tensor.data_ptr() + start, base + at, length))
                at += length
        self.bytes = sum(tensor.nbytes for tensor in tensors)

    def save(self) -> float:
        """Seconds to copy the state into the memory."""
        return self._run(inwards=True)

    def load(self) -> float:
        """Seconds to copy the memory into the state."""
        return self._run(inwards=False)

    def start_save(self) -> threading.Thread:
        """The same by one thread in the background: the least that any overlap can cost."""

        def copy() -> None:
            for live, shared, length in self._pieces:
                ctypes.memmove(shared, live, length)

        thread = threading.Thread(target=copy)
        thread.start()
        return thread

    def _run(self, *, inwards: bool) -> float:
        work = iter(self._pieces)
        lock = threading.Lock()

        def copy() -> None:
            while True:
                with lock:
                    piece = next(work, None)
                if piece is None:
                    return
                live, shared, length = piece
                target, source = (shared, live) if inwards else (live, shared)
                ctypes.memmove(target, source, length)

        threads = [threading.Thread(target=copy) for _ in range(2)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began
