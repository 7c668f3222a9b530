"""Builds the kernels: every `.pyx` below seamark/metaserver/ becomes an extension beside it. The rest is in
pyproject.toml.

Kernels take typed memoryviews, so no library's headers are needed, only a C compiler and Python's own. The flags name
no processor: what is built here runs on any machine of the same architecture. The C files go to build/.

To compile by hand after an edit: `.venv/bin/python setup.py -q build_ext --inplace`; `make venv` does the same.
SEAMARK_CHECKED=1 builds kernels that check each access: memoryviews by Cython, all else by the compiler's sanitizers,
whose libraries then have to be preloaded (tests/index/test_sanitised.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

CHECKED = os.environ.get("SEAMARK_CHECKED") == "1"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": CHECKED,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "freethreading_compatible": False,
}

KERNELS = [
    Extension(
        ".".join(path.with_suffix("").parts),
        [str(path)],
        extra_compile_args=[
            "-fno-strict-aliasing",
            "-Wno-discarded-qualifiers",
            *(["-O1", "-g", *SANITIZERS] if CHECKED else ["-O3", "-g0"]),
        ],
        extra_link_args=SANITIZERS if CHECKED else [],
    )
    for path in sorted(Path("seamark/metaserver").rglob("*.pyx"))
]

setup(
    ext_modules=cythonize(KERNELS, build_dir="build/kernels", compiler_directives=DIRECTIVES, force=CHECKED),
    options={"build_ext": {"parallel": os.cpu_count()}},
)
