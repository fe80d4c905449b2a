# SPDX-License-Identifier: Apache-2.0
"""Holdfast and Ray: Ray Data reads the shards of a dataset (holdfast.platforms.ray.data)."""
