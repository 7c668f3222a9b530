"""The options of a run of the demo, and the folder of its server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.services.process import REPO, choose_free_port, is_http_ok, is_port_open

KEPT_PORT = 8181
NOTE = "kept.json"
"""The name of the file in the server's folder with the URL and the process id of the server that keeps running."""
_NO = ("0", "no", "false")
"""The values of an environment variable that turn an option off."""


class DemoFailed(Exception):
    """The demo failed. The message is a sentence for its user."""


@dataclass(frozen=True)
class Options:
    """The options of a run of the demo.

    Attributes:
        scale: The scale of the benchmark; scale 1 has 6 million facts.
        keep: The server keeps running in the folder `home` after the demo.
        trino: Trino runs the queries as well, if it is installed.
    """

    scale: float = 0.5
    fact_files: int = 400
    rounds: int = 1
    keep: bool = False
    trino: bool = True
    home: Path = REPO / "demo-home"
    report: Path = REPO / "reports" / "demo.html"

    @staticmethod
    def read(env: os._Environ[str] | dict[str, str]) -> Options:
        """Read `SCALE`, `FILES`, `ROUNDS`, `KEEP`, `TRINO`, `DEMO_HOME` and `DEMO_REPORT`.

        An empty value means the default.
        """
        try:
            scale = float(env.get("SCALE") or Options.scale)
            files, rounds = int(env.get("FILES") or Options.fact_files), int(env.get("ROUNDS") or Options.rounds)
        except ValueError as error:
            raise DemoFailed(f"SCALE must be a number, FILES and ROUNDS whole numbers ({error})") from None
        if not (0.001 <= scale <= 100 and 1 <= files <= 100_000 and 1 <= rounds <= 100):
            raise DemoFailed(
                "SCALE must be between 0.001 and 100, FILES between 1 and 100000, ROUNDS between 1 and 100"
            )
        keep, trino = ((env.get(name) or default) not in _NO for name, default in (("KEEP", "0"), ("TRINO", "1")))
        home, report = Path(env.get("DEMO_HOME") or Options.home), Path(env.get("DEMO_REPORT") or Options.report)
        return Options(scale, files, rounds, keep, trino, home, report)

    @property
    def port(self) -> int:
        return KEPT_PORT if self.keep and not is_port_open(KEPT_PORT) else choose_free_port()


@contextlib.contextmanager
def provide_home(options: Options) -> Iterator[Path]:
    """Provide the folder of the server.

    If the server keeps running after the demo, the folder is `options.home`, which is emptied first. Otherwise it is a
    temporary folder.

    Raises:
        DemoFailed: The server of an earlier demo runs in `options.home`, or the folder has files of another origin.
    """
    if not options.keep:
        with tempfile.TemporaryDirectory(prefix="seamark-demo-") as folder:
            yield Path(folder)
        return
    note = options.home / NOTE
    saved_options = json.loads(note.read_text()) if note.exists() else None
    if saved_options and is_http_ok(f"{saved_options['url']}/readyz"):
        raise DemoFailed(
            f"The server of an earlier demo runs at {saved_options['url']}. Stop it: kill {saved_options['pid']}"
        )
    if options.home.exists() and not note.exists() and any(options.home.iterdir()):
        raise DemoFailed(f"{options.home} is not empty, and no earlier demo created it. Choose another DEMO_HOME")
    shutil.rmtree(options.home, ignore_errors=True)
    options.home.mkdir(parents=True)
    note.write_text("null")  # The marker shows that the folder belongs to the demo, even if this run fails.
    yield options.home.absolute()
