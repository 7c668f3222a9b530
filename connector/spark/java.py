"""Checks whether PySpark can start Java."""

from __future__ import annotations

import os
import shutil

NO_GATEWAY = "JAVA_GATEWAY_EXITED"
"""The name of PySpark's error for a JVM that does not start."""


def find_java_problem() -> str | None:
    """Return the reason why Spark finds no Java, and how to fix it. Return None if Spark finds Java."""
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=os.path.join(home, "bin") if home else None) is not None:
        return None
    if home:
        return f"JAVA_HOME is {home}, which has no bin/java: set it to the home of a JDK 17 or newer, or unset it"
    return "there is no Java: install a JDK 17 or newer, for example with apt-get install openjdk-17-jdk-headless"
