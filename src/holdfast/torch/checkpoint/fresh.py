# SPDX-License-Identifier: Apache-2.0
"""New tensors for saved ones without a live tensor: the state of an optimizer, mostly."""

import ctypes

import torch

LARGE = 4 * 1024 * 1024
_PAGE = 4096
_MADV_HUGEPAGE = 14
_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def fresh_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor to write to. A large one asks for large pages: the kernel makes them much sooner."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= LARGE:
        address = tensor.data_ptr()
        begin = -(-address // _PAGE) * _PAGE
        # Only advice: a system without large pages refuses it, and nothing is lost.
        _LIBC.madvise(begin, (address + tensor.nbytes - begin) // _PAGE * _PAGE, _MADV_HUGEPAGE)
    return tensor
