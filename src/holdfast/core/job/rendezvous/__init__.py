# SPDX-License-Identifier: Apache-2.0
"""Worlds: which nodes train together, in which order, and when that changes.

Owns the present world and its round, who stands ready for the next, and which worlds before it may
still compute. It knows nodes by what membership says of them.
"""
