# SPDX-License-Identifier: Apache-2.0
"""Flash checkpoints for frameworks with their own checkpoint format.

Each module needs its framework; only users of the framework import it. Checkpoints on storage have
the framework's own layout: the framework reads them without Holdfast.
"""
