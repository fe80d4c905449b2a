# SPDX-License-Identifier: Apache-2.0
"""The real cores under one seed, with virtual time, network, disk, platform and workers."""
