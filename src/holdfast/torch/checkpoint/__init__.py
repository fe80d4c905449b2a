# SPDX-License-Identifier: Apache-2.0
"""Saving and loading the state of a training: from objects of torch to bytes in memory, and back.

`checkpointer.py` is what a script calls; `session.py` talks to the agent's vault. `state.py`,
`plain.py` and the `sharded*.py` files turn modules and optimizers into tensors and plain values;
`images.py` and the `*_image.py` files say where each byte is in a file. The agent moves the bytes.
"""
