# SPDX-License-Identifier: Apache-2.0
"""Flash checkpoints for frameworks that have a checkpoint format of their own.

Each module needs its framework and is imported by those who have it. What they save lands on
storage in the framework's own layout: it is read without Holdfast, by the framework alone.
"""
