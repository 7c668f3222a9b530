"""The production set-up of the README runs as printed: PostgreSQL, S3, TLS, a token, two servers.

Only texts that depend on the machine are replaced, as for other pages. The certificate is of a private authority and
names no address, but the host of the clients: the workers of table services connect to a server whose name they cannot
verify.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog

from seamark.connector.client.indexes import IndexClient
from tests.docs.pages import REPO, Block, Page
from tests.services.authority import Authority
from tests.services.forking_command import install_forking_command
from tests.services.process import ManagedProcess, choose_free_port, is_port_open
from tests.services.s3 import S3
from tests.waits import block_until

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
POLICY = {"seamark.compaction.enabled": "true", "seamark.compaction.min-files": "2"}
HOST = "localhost"


def find_production_blocks() -> tuple[Block, Block, Block]:
    """Return three blocks of the README: the variables, the command that creates the token, and the server."""
    page = Page(REPO / "README.md")
    heading_lines = {line: number for number, line in enumerate(page.text.splitlines(), 1) if line.startswith("## ")}
    begin = heading_lines["## Production"]
    end = min(number for number in heading_lines.values() if number > begin)
    variables, token, server = (block for block in page.blocks if begin < block.line < end)
    return variables, token, server


@dataclass
class Production:
    """The production set-up of the README.

    Attributes:
        folder: The folder of the servers' homes and logs.
        replacements: The replacements of texts of the README.
        exit_stack: It ends the servers.
        environment: The variables of clients and servers.
        variables: The commands of the README that set variables.
        serve: The command of the README that starts a server.
        servers: The started servers, and `urls` has their URLs.
    """

    folder: Path
    replacements: dict[str, str]
    exit_stack: ExitStack
    environment: dict[str, str]
    variables: str = ""
    serve: str = ""
    servers: list[ManagedProcess] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def adapt_text(self, block: Block) -> str:
        """Return the text of the block after all replacements.

        Each replaced text must occur in one of the blocks of the README.
        """
        text = block.text
        readme_text = "".join(production_block.text for production_block in find_production_blocks())
        for old_text, new_text in self.replacements.items():
            assert old_text in readme_text, old_text
            text = text.replace(old_text, new_text)
        return text

    def start(self, **additional_variables: str) -> str:
        """Start one more server with its own home and port, as on a separate machine, and return its URL."""
        number, port = len(self.servers), choose_free_port()
        home = self.folder / f"server-{number}"
        server_environment = {"SEAMARK_HOME": str(home), "SEAMARK_PORT": str(port), **additional_variables}
        process = ManagedProcess(
            ["bash", "-euc", f"unset SEAMARK_CA SEAMARK_TOKEN\n{self.variables}\n{self.serve}"],
            log=self.folder / f"server-{number}.log",
            env={**self.environment, **server_environment},
            cwd=self.folder,
        )
        self.exit_stack.callback(process.stop)
        process.start(lambda: is_port_open(port) and (home / "server.json").exists(), timeout_s=90)
        self.servers.append(process)
        self.urls.append(f"https://{HOST}:{port}")
        return self.urls[-1]

    def run_seamark(self, *arguments: str, url: str) -> tuple[int, str]:
        """Run a client command, and return (exit code, output)."""
        environment = {**self.environment, "SEAMARK_URL": url}
        result = subprocess.run(
            ["seamark", *arguments], env=environment, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        return result.returncode, result.stdout + result.stderr


@pytest.fixture
def production(
    tmp_path: Path, postgres_url: str, s3: S3, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Production]:
    """Prepare the production set-up of the README for this machine, with a token for its clients."""
    variables, token, server = find_production_blocks()
    authority = Authority(tmp_path, (HOST,))
    authority.issue("seamark")
    replacements = {
        "postgresql://seamark:secret@db.example/seamark": postgres_url,
        "the-encryption-key": base64.b64encode(secrets.token_bytes(32)).decode(),
        "the-access-key": s3.access_key,
        "the-secret-key": s3.secret_key,
        "http://s3.example:9000": s3.endpoint,
        "s3://lake": f"s3://{s3_bucket}",
        "0.0.0.0": "127.0.0.1",  # Tests open no port to other machines.
        "--workers 4": "--workers 2",
    }
    with ExitStack() as stack:
        commands = tmp_path / ".bin"
        commands.mkdir()
        stack.enter_context(install_forking_command(commands))
        inherited_env = {name: os.environ[name] for name in ("HOME", "LANG", "VIRTUAL_ENV") if name in os.environ}
        path = f"{commands}:{os.environ['PATH']}"
        environment = {**inherited_env, "PATH": path, "SEAMARK_CA": str(authority.file)}
        new_production = Production(tmp_path, replacements, stack, environment)
        new_production.variables, new_production.serve = (
            new_production.adapt_text(variables),
            new_production.adapt_text(server),
        )
        create_token = f"{new_production.variables}\n{new_production.adapt_text(token)}"
        result = subprocess.run(
            ["bash", "-euc", create_token], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        new_production.environment["SEAMARK_TOKEN"] = result.stdout.split()[-1]
        for name in ("SEAMARK_CA", "SEAMARK_TOKEN"):
            monkeypatch.setenv(name, new_production.environment[name])
        # docs/how-to/authentication.md recommends this setting for PyIceberg and s3fs.
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.file))
        # The assignment has the effect of FSSPEC_S3_SKIP_INSTANCE_CACHE, because the process has already
        # imported fsspec.
        monkeypatch.setitem(fsspec.config.conf, "s3", {"skip_instance_cache": True})
        yield new_production
    shutil.rmtree(tmp_path, ignore_errors=True)


def append_numbers(production: Production, name: str, *numbers: int) -> None:
    """Append one row for each number, in commits of their own. If the table does not exist, create it with an index."""
    properties = {"header.X-Iceberg-Access-Delegation": "remote-signing"}
    token = production.environment["SEAMARK_TOKEN"]
    tls_options: Any = {"ssl": {"cabundle": production.environment["SEAMARK_CA"]}}
    with closing(RestCatalog("sea", uri=production.urls[-1], token=token, **properties, **tls_options)) as catalog:
        if not catalog.namespace_exists("db"):
            catalog.create_namespace("db")
        if not catalog.table_exists(name):
            catalog.create_table(name, SCHEMA, properties={"seamark.index.by_name": "bloom(name)", **POLICY})
        table = catalog.load_table(name)
        for number in numbers:
            table.append(pa.table({"id": [number], "name": [f"name {number}"]}, schema=SCHEMA))


@pytest.mark.slow  # Faster tests cover the parts: PostgreSQL, S3, TLS, tokens and table services.
@pytest.mark.filterwarnings("ignore")  # The clients cause these warnings.
def test_production_servers_index_and_maintain_tables(production: Production) -> None:
    """There are two servers. When the server that runs table services ends, the other server takes over."""
    production.start()
    url = production.start()
    append_numbers(production, "db.t", 1, 2, 3)
    token = production.environment["SEAMARK_TOKEN"]
    with closing(IndexClient(url, token=token)) as client:

        def is_maintained(appended_rows: int) -> bool:
            """Return True if all files are indexed, and the `appended_rows` rows are in fewer files.

            Each row was appended in a separate file.
            """
            index, health = client.index("db.t", "by_name"), client.health("db.t")
            is_compacted = health["records"] == appended_rows and health["files"] < appended_rows
            return (index.health, index.lag_files) == ("ok", 0) and is_compacted

        def list_runs() -> list[dict[str, Any]]:
            return [run.summary for run in client.timeline("db.t", action="maintenance")]

        def count_compactions() -> int:
            return sum(run["service"] == "compaction" for run in list_runs())

        block_until(lambda: is_maintained(3) and {run["service"] for run in list_runs()} >= {"indexing", "compaction"})
        assert not any("error" in run for run in list_runs()), list_runs()
        assert client.explain("db.t", "name = 'no such name'").files == 0

        for command, message in (("services", "compaction"), ("health", "3 rows")):
            code, text = production.run_seamark(command, "db.t", url=url)
            assert (code, message in text) == (0, True), text
        code, text = production.run_seamark("doctor", "--url", url, url=url)
        assert (code, "table services: a server runs them" in text) == (0, True), text

        count_before = count_compactions()
        production.servers[0].stop()
        append_numbers(production, "db.t", 4, 5)
        block_until(lambda: is_maintained(5) and count_compactions() > count_before, within_s=150)
