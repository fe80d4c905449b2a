# SPDX-License-Identifier: Apache-2.0
"""What an agent decides about the workers of its node."""
