# SPDX-License-Identifier: Apache-2.0
"""The adapter for PyTorch. Importing it makes torch know `init_method="holdfast://"`."""

from holdfast.torch.store import HoldfastStore

__all__ = ["HoldfastStore"]
