# SPDX-License-Identifier: Apache-2.0
"""The training script of `holdfast demo`. It is run, never imported: only it needs torch."""
