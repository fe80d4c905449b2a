# SPDX-License-Identifier: Apache-2.0
"""The C extension; everything else is in pyproject.toml.

It uses only the stable ABI, so that one wheel serves Python 3.11 and every later one. Python
without the global lock has no stable ABI yet: there the extension is built for that one version.
"""

import sysconfig

from setuptools import Extension, setup

HAS_STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "holdfast.checkpoint._streaming",
            ["src/holdfast/checkpoint/_streaming.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if HAS_STABLE_ABI else [],
            py_limited_api=HAS_STABLE_ABI,
            # Without a C compiler the package installs all the same, and the C library copies.
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if HAS_STABLE_ABI else {},
)
