# SPDX-License-Identifier: Apache-2.0
"""Holdfast for TensorFlow: data (holdfast.tensorflow.data). TensorFlow is imported only here."""
