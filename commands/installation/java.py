"""Check the Java installations of this machine: the Java that Spark uses, and a JDK for Trino."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from seamark.commands.installation.engine_files import CheckResult

JAVA_SPARK, JAVA_TRINO = 17, 25
_JVMS = Path("/usr/lib/jvm")
_START_S = 20


def check_java() -> Iterator[CheckResult]:
    """Check the Java of Spark and of Trino.

    A variable that does not point to a JDK is a fault. A missing Java is not, because Spark and Trino are optional.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    version = None if java is None else read_java_version(java)
    if home and java is None:
        fix = "Set JAVA_HOME to the folder that contains bin/java, or unset it"
        yield CheckResult("Java for Spark", f"JAVA_HOME is {home}, which has no bin/java", fix, is_fault=True)
    elif version is None:
        fix = f"To use Spark, install a JDK {JAVA_SPARK} or newer: apt-get install openjdk-17-jdk-headless"
        yield CheckResult(
            "Java for Spark", "java is not on the PATH" if java is None else f"{java} does not start", fix
        )
    elif version < JAVA_SPARK:
        fix = f"Spark 4 needs {JAVA_SPARK} or newer: set JAVA_HOME to its home"
        yield CheckResult("Java for Spark", f"{java} is version {version}", fix)
    else:
        yield CheckResult("Java for Spark", f"{java} is version {version}")
    java_25, home_25 = os.environ.get("JAVA25"), find_java_25_home()
    if home_25 is not None:
        yield CheckResult("Java for Trino", f"{home_25} is version {_read_release_version(home_25)}")
    elif java_25:
        fix = f"Set JAVA25 to the home of a JDK {JAVA_TRINO} or newer, or unset it"
        yield CheckResult("Java for Trino", f"JAVA25 is {java_25}, which is no JDK {JAVA_TRINO}", fix, is_fault=True)
    else:
        fix = f"To run Trino on this machine, install a JDK {JAVA_TRINO} below {_JVMS}, or set JAVA25 to its home"
        yield CheckResult("Java for Trino", f"there is no JDK {JAVA_TRINO}", fix)


def read_java_version(java: str) -> int | None:
    """Return the major version of the Java program at the path `java`, or None if it does not run."""
    try:
        process = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_START_S)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', process.stderr + process.stdout)
    return None if match is None else int(match[1])


def find_java_25_home() -> Path | None:
    """Return the home of a JDK 25 or newer: the value of the variable `JAVA25`, or the first JDK below /usr/lib/jvm."""
    java_25 = os.environ.get("JAVA25")
    homes = [Path(java_25)] if java_25 else sorted(_JVMS.glob("*"))
    return next((home for home in homes if (_read_release_version(home) or 0) >= JAVA_TRINO), None)


def _read_release_version(home: Path) -> int | None:
    try:
        match = re.search(r'JAVA_VERSION="(\d+)', (home / "release").read_text())
    except (OSError, UnicodeDecodeError):
        return None
    return None if match is None else int(match[1])
