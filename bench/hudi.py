"""Run Hudi 1.2 on PySpark 3.5 in `local[2]`, in a separate process.

`make hudi` downloads both. The process reads lines of JSON, and writes one answer for each line.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.services.java import find_java_17
from tests.services.process import CACHE, REPO, ServiceFailed

_HOME = CACHE / "hudi"
_PYTHON_PATH = _HOME / "venv" / "bin" / "python"


class HudiSession:
    """A running session that answers requests one after another."""

    def __init__(self, child: subprocess.Popen[str], log: Path) -> None:
        self._child, self._log = child, log

    def ask(self, **kwargs: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(kwargs) + "\n")
        self._child.stdin.flush()
        return self.read_answer()

    def read_answer(self) -> dict[str, Any]:
        """Return the next answer, or the next message that the session sends without a request."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait()
            raise ServiceFailed(f"Hudi's session ended with {code}\n{self._log.read_text()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def is_hudi_installed() -> bool:
    return _PYTHON_PATH.exists() and bool(_find_jars())


def _find_jars() -> list[Path]:
    return sorted((_HOME / "jars").glob("hudi-spark3.5-bundle_*.jar"))


@contextmanager
def open_session(module: str, folder: Path, *arguments: str) -> Iterator[HudiSession]:
    """Run `module` in a process with the path of Hudi's jar, a scratch folder and `arguments`.

    The process ends with the block.
    """
    if not is_hudi_installed():
        raise ServiceFailed("Hudi is not installed in .cache/hudi; run `make hudi`")
    folder.mkdir(exist_ok=True)
    log = folder / "hudi.log"
    home = str(Path(find_java_17()).resolve().parents[1])
    env = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    env |= {"PYSPARK_PYTHON": str(_PYTHON_PATH), "PYSPARK_DRIVER_PYTHON": str(_PYTHON_PATH), "JAVA_HOME": home}
    env["PYTHONPATH"] = str(REPO)
    argv = [str(_PYTHON_PATH), "-m", module, str(_find_jars()[-1]), str(folder), *arguments]
    with log.open("wb") as errors:
        child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=folder
        )
    try:
        yield HudiSession(child, log)
    finally:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()  # The process ends at the end of its input, and its JVM ends too.
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
