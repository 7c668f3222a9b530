"""Run a page from top to bottom, as a reader with a terminal would: its commands, its Python, its Spark SQL.

Before a block runs, some texts are replaced: the ports 8181 and 8182 by free ports, and the example's bucket, store and
database by those of the test. The rest of a block stays unchanged.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from tests.docs.pages import Block, Page, read_all_pages
from tests.services.forking_command import install_forking_command
from tests.services.process import ManagedProcess, choose_free_port, is_http_ok

EXECUTED_PAGES = [page for page in read_all_pages() if any(block.mark for block in page.blocks)]
CATALOG = "sea"
"""The catalog's name in all pages."""
SLOW_PAGES = {
    "docs/explanation/cubes.md",
    "docs/tutorial-streaming.md",
    "docs/tutorial.md",
    *(
        f"docs/how-to/{name}.md"
        for name in (
            *("authentication", "buckets", "catalog-commands", "cluster", "commit-api", "connect-spark", "console"),
            *("explain-and-lookups", "lookups", "merge-files-and-drop-columns", "objects-gateway", "operate"),
            *("plan-on-the-server", "plan-tables", "postgresql-and-replicas", "read-from-spark", "s3", "sql"),
            *("table-services", "undrop-and-purge", "upsert-without-looking", "upserts"),
            *("webhooks", "write-from-spark"),
        )
    ),
}
"""Pages of single features, which have their own tests.

The fast tier runs the pages that every reader needs first: the README, how to connect PyIceberg and DuckDB, and how to
define indexes. Of the pages with Spark, it runs only the README.
"""


@dataclass
class Run:
    """A run of one page in `folder`. `replacements` maps texts of the page to their replacements."""

    page: Page
    folder: Path
    replacements: Mapping[str, str]
    spark: Callable[[], Any]
    """Return the Spark session. Only pages that need Spark call this function."""
    exit_stack: contextlib.ExitStack
    port: int = field(default_factory=choose_free_port)
    gateway_port: int = field(default_factory=choose_free_port)
    output: str = ""
    names: dict[str, Any] = field(default_factory=dict)
    catalog: str = ""

    def __post_init__(self) -> None:
        bin_folder = self.folder / ".bin"
        bin_folder.mkdir()
        # The program `seamark` of this folder runs the commands of a page in forks of a process that has loaded the
        # modules. A command then takes 0.1 s of CPU time instead of 0.4 to 1 s.
        self.exit_stack.enter_context(install_forking_command(bin_folder))
        path = f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        # Pages that do not set the port use this port. Table services are off, because they would interfere with
        # the commands of the page.
        services = {"SEAMARK_SERVICES_WORKERS": "0"}
        self.environment = {**os.environ, "PATH": path, "SEAMARK_PORT": str(self.port), **services}
        self.steps: dict[str, Callable[[str], str]] = {
            "run bash": self._run_bash,
            "run python": self._run_python,
            "run: server bash": self._start_server,
            "run: spark-catalog bash": self._add_spark_catalog,
            "run: spark sql": self._run_spark_sql,
        }

    def run_block(self, block: Block) -> None:
        """Run the block.

        Raises:
            AssertionError: The block fails, or its output differs from the page; the message has the line.
        """
        text = self._adapt_text(block.text)
        try:
            if block.mark == "output":
                check_output(self.output, text)
            elif block.mark.startswith("file: "):
                target = self.folder / block.mark.removeprefix("file: ")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
            elif block.mark:
                self.output = self.steps[f"{block.mark} {block.language}"](text)
        except Exception as error:
            raise AssertionError(f"{self.page}:{block.line}: {error}") from error

    def _adapt_text(self, text: str) -> str:
        ports = {"8181": str(self.port), "8182": str(self.gateway_port)}
        text = re.sub("8181|8182", lambda match: ports[match[0]], text)
        for old_text, new_text in self.replacements.items():
            text = text.replace(old_text, new_text)
        return text

    def _run_bash(self, text: str) -> str:
        environment_path = self.folder / ".environment"
        script = f"set -euo pipefail\n{text}\nenv -0 > {shlex.quote(str(environment_path))}\n"
        result = subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60
        )
        if result.returncode:
            raise AssertionError(f"ended with {result.returncode}\n{result.stdout}{result.stderr}")
        self.environment = dict(line.split("=", 1) for line in environment_path.read_text().split("\0") if "=" in line)
        return result.stdout

    def _run_python(self, text: str) -> str:
        output = io.StringIO()
        old_environment = dict(os.environ)
        os.environ.update(self.environment)
        try:
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(output):
                exec(compile(text, str(self.page), "exec"), self.names)
        finally:
            os.environ.clear()
            os.environ.update(old_environment)
        return output.getvalue()

    def _start_server(self, text: str) -> str:
        process = ManagedProcess(
            ["bash", "-euc", text], log=self.folder / "server.log", env=self.environment, cwd=self.folder
        )
        self.exit_stack.callback(process.stop)
        process.start(lambda: is_http_ok(f"http://127.0.0.1:{self.port}/readyz"), timeout_s=90)
        return process.log.read_text()

    def _add_spark_catalog(self, text: str) -> str:
        """Add the catalog of the command to the running Spark session, under a name that no other page uses."""
        self.catalog = f"{CATALOG}{self.port}"
        conf = read_spark_conf(text)
        prefix = f"spark.sql.catalog.{CATALOG}"
        from seamark.connector.spark.session import add_catalog  # The import of PySpark takes a second.

        catalog_conf = {
            key.replace(prefix, f"spark.sql.catalog.{self.catalog}"): conf[key] for key in conf if prefix in key
        }
        add_catalog(self.spark(), catalog_conf)
        return ""

    def _run_spark_sql(self, text: str) -> str:
        lines: list[str] = []
        for statement in filter(None, (part.strip() for part in text.split(";"))):
            statement = re.sub(rf"\b{CATALOG}\.", f"{self.catalog}.", statement)
            rows = self.spark().sql(statement).collect()
            lines += ["\t".join(str(value) for value in row) for row in rows]
        return "\n".join(lines)


def read_spark_conf(command: str) -> dict[str, str]:
    """Return the values of the options `--conf key=value` of a command, by key."""
    words = shlex.split(command.replace("\\\n", " "))
    arguments = [words[index + 1] for index, word in enumerate(words) if word == "--conf"]
    return dict(argument.split("=", 1) for argument in arguments)


def check_output(output: str, expected: str) -> None:
    """Compare the output line by line, without spaces at the ends.

    `…` in `expected` matches any text within a line, and any lines if it is alone on a line.
    """
    pattern = []
    for line in expected.strip().splitlines():
        if line.strip() == "…":
            pattern.append(r"(?:.*\n)*?")
        else:
            pattern.append(".*?".join(re.escape(part.strip(" ")) for part in line.split("…")) + r"\s*\n")
    text = "\n".join(line.strip() for line in output.strip().splitlines()) + "\n"
    if not re.fullmatch("".join(pattern), text):
        raise AssertionError(f"the page says\n{expected}\nbut the output is\n{output}")


@contextlib.contextmanager
def open_page_run(page: Page, folder: Path, replacements: Mapping[str, str], spark: Callable[[], Any]) -> Iterator[Run]:
    """Yield a run of the page, and afterwards end its processes and collect the sockets that clients leave open."""
    with contextlib.ExitStack() as stack:
        run = Run(page, folder, replacements, spark, stack)
        yield run
        run.names.clear()
        gc.collect()


def run_page(page: Page, folder: Path, request: pytest.FixtureRequest) -> None:
    """Run the page with the test's bucket, store and database instead of those of the examples."""
    replacements: dict[str, str] = {}
    executed_text = "".join(block.text for block in page.blocks if block.mark)
    if "s3://lake" in executed_text:
        s3 = request.getfixturevalue("s3")
        replacements |= {
            "s3://lake": f"s3://{request.getfixturevalue('s3_bucket')}",
            "http://s3.example:9000": s3.endpoint,
            "the-access-key": s3.access_key,
            "the-secret-key": s3.secret_key,
        }
    if "@db.example/" in executed_text:
        replacements["postgresql://seamark:secret@db.example/seamark"] = request.getfixturevalue("postgres_url")

    def get_spark() -> Any:
        return request.getfixturevalue("spark")

    with open_page_run(page, folder, replacements, get_spark) as run:
        for block in page.blocks:
            run.run_block(block)


def list_pages_to_run(*, with_spark: bool) -> list[ParameterSet]:
    """Return the parameters of the pages that need Spark, or of the other pages."""
    pages = [page for page in EXECUTED_PAGES if has_spark_blocks(page) is with_spark]
    return [pytest.param(page, marks=[pytest.mark.slow] if str(page) in SLOW_PAGES else []) for page in pages]


def has_spark_blocks(page: Page) -> bool:
    return any("spark" in block.mark for block in page.blocks)
