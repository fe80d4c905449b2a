# SPDX-License-Identifier: Apache-2.0
"""The test suite; a real package, so that no other one called `tests` hides `tests.waiting`."""
