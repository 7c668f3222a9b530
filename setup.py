"""Builds the kernels: every `.pyx` below seamark/formats/ and seamark/metaserver/ becomes an extension beside it.

The other settings of the build are in pyproject.toml.

Kernels take typed memoryviews, so no library's headers are needed, only a C compiler and Python's own. The flags name
no processor: what is built here runs on any machine of the same architecture. The C files go to build/.

To compile by hand after an edit: `.venv/bin/python setup.py -q build_ext --inplace`; `make venv` does the same.
SEAMARK_KERNELS=0 leaves them out: an editable installation would compile them in a folder of its own, and again at the
next edit. SEAMARK_CHECKED=1 builds kernels that check each access: memoryviews by Cython, all else by the compiler's
sanitizers, whose libraries then have to be preloaded (tests/index/test_sanitised.py).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

INSTALLERS = {
    "apt-get": "apt-get install gcc libc6-dev python3-dev",
    "dnf": "dnf install gcc python3-devel",
    "zypper": "zypper install gcc python3-devel",
}
"""By the program of the system: what installs a C compiler with Python's headers."""


def check_compiler() -> None:
    """Check that C code can be compiled. Call it before Cython translates the kernels, which takes longer.

    Raises:
        SystemExit: A C compiler or Python's headers are missing. The message has the command that installs them.
    """
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "headers.c"
        source.write_text("#include <Python.h>\n#include <stdio.h>\n")
        argv = [*compiler, f"-I{sysconfig.get_path('include')}", "-c", str(source), "-o", str(source.with_suffix(".o"))]
        try:
            fails = subprocess.run(argv, capture_output=True, check=False).returncode != 0  # noqa: S603
        except OSError:
            fails = True
    if fails:
        commands = (command for program, command in INSTALLERS.items() if shutil.which(program))
        command = next(commands, INSTALLERS["apt-get"])
        raise SystemExit(f"Seamark's kernels need a C compiler and Python's headers. Run: {command}")


HAS_KERNELS = os.environ.get("SEAMARK_KERNELS") != "0"
if HAS_KERNELS:
    check_compiler()

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
    for package in ("formats", "metaserver")
    for path in sorted(Path("seamark", package).rglob("*.pyx"))
]

setup(
    ext_modules=cythonize(
        KERNELS if HAS_KERNELS else [], build_dir="build/kernels", compiler_directives=DIRECTIVES, force=CHECKED
    ),
    options={"build_ext": {"parallel": os.cpu_count()}},
)
