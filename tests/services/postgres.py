"""A PostgreSQL server with compose's configuration, in a new cluster.

PostgreSQL refuses to run as root. If the tests run as root, they run the server as the user `postgres`, from a folder
outside of pytest's folder, which only root may enter. The command line sets only the port and the socket folder. All
other settings are in `deploy/postgres/postgresql.conf`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.services.memory import find_folder_in_memory
from tests.services.process import CACHE, DEPLOY, ManagedProcess, ServiceFailed, choose_free_port

CONFIG = DEPLOY / "postgres" / "postgresql.conf"
USER = "seamark"
PASSWORD = "seamark"


def _find_binary(name: str) -> str:
    """Return the path of a PostgreSQL program: in Debian's folder of the newest version, or on PATH.

    On Debian, the client programs on PATH are a Perl script. It takes five times as much CPU time to start as psql
    itself.
    """
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    program_path = next((str(path / name) for path in folders if (path / name).exists()), None) or shutil.which(name)
    if program_path is None:
        raise ServiceFailed(f"{name} not found: run `make services`")
    return program_path


def _run_as_server_user(argv: list[str]) -> list[str]:
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", *argv] if os.geteuid() == 0 else argv


@dataclass
class Postgres:
    """A running PostgreSQL server.

    `make_url(database)` returns a DSN for asyncpg. `create_database()` takes about 50 ms.
    """

    port: int
    process: ManagedProcess
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def make_url(self, database: str = "postgres") -> str:
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def run_sql(self, statement: str, database: str = "postgres") -> str:
        """Run `statement` with psql. Return the rows as text, one in each line, with columns separated by |."""
        options = ["--no-psqlrc", "--quiet", "--no-align", "--tuples-only", "--set=ON_ERROR_STOP=1"]
        argv = [_find_binary("psql"), *options, "--command", statement, self.make_url(database)]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        if result.returncode:
            raise ServiceFailed(f"{statement!r}: {result.stderr.strip()}")
        return result.stdout.strip()

    def create_database(self, name: str = "") -> str:
        """Create an empty database, and return its URL."""
        name = name or f"seamark_{next(self._numbers)}"
        self.run_sql(f'CREATE DATABASE "{name}"')
        return self.make_url(name)

    def clear_database(self, url: str) -> None:
        """Return the database of `url` to its initial state.

        This takes a tenth of the time of creating another database.
        """
        database_name = _get_database_name(url)
        other_sessions = f"FROM pg_stat_activity WHERE datname = '{database_name}' AND pid <> pg_backend_pid()"
        end_sessions = f"SELECT count(pg_terminate_backend(pid, 10000)) {other_sessions}"
        create_schema = "CREATE SCHEMA public AUTHORIZATION pg_database_owner; GRANT USAGE ON SCHEMA public TO PUBLIC"
        self.run_sql(f"{end_sessions}; DROP SCHEMA public CASCADE; {create_schema}", database_name)

    def delete_rows(self, url: str, keep: Sequence[str], replacement_sql: str) -> None:
        """End all other sessions of the database, and delete the rows of all tables except `keep`.

        This takes less time than creating the tables again.

        Args:
            url: The URL of the database.
            keep: The tables whose rows stay.
            replacement_sql: A statement to execute afterwards.
        """
        other_sessions = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        kept_tables = ", ".join(f"'{name}'" for name in keep)
        tables = f"SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename NOT IN ({kept_tables})"
        delete_all = f"DO $$ DECLARE t text; BEGIN FOR t IN {tables} LOOP EXECUTE 'DELETE FROM ' || t; END LOOP; END $$"
        end_sessions = f"SELECT count(pg_terminate_backend(pid, 10000)) {other_sessions}"
        self.run_sql(f"{end_sessions}; {delete_all}; {replacement_sql}", _get_database_name(url))

    def drop_database(self, url: str) -> None:
        """Drop the database of `url`, and end all its connections."""
        self.run_sql(f'DROP DATABASE IF EXISTS "{_get_database_name(url)}" WITH (FORCE)')


def _get_database_name(url: str) -> str:
    _, name = url.rsplit("/", 1)
    return name


def _create_cluster(data: Path, password: Path) -> None:
    """Create the files of a new cluster.

    The first call stores a copy of them in `.cache`, because a copy takes a tenth of the time of `initdb`. If two first
    calls run at the same time, both succeed.
    """
    initdb = Path(_find_binary("initdb"))
    # Only the user who created a cluster may read it.
    copy_name = f"{initdb.resolve().parents[1].name}-{initdb.stat().st_mtime_ns}-{os.geteuid()}"
    cluster_folder = CACHE / "postgres-clusters" / copy_name
    if cluster_folder.exists():
        _copy_folder(cluster_folder, data)
        return
    argv = [str(initdb), "-D", str(data), "-U", USER, "--pwfile", str(password), "--auth=scram-sha-256"]
    argv += ["--no-sync", "--encoding=UTF8", "--locale=C.UTF-8", "--no-instructions"]
    result = subprocess.run(_run_as_server_user(argv), capture_output=True, text=True, cwd=data.parent, timeout=120)
    if result.returncode:
        raise ServiceFailed(f"initdb failed: {result.stdout}{result.stderr}")
    cluster_folder.parent.mkdir(parents=True, exist_ok=True)
    new_folder = Path(tempfile.mkdtemp(dir=cluster_folder.parent))
    _copy_folder(data, new_folder / "data")
    try:
        (new_folder / "data").rename(cluster_folder)
    except OSError:
        shutil.rmtree(new_folder / "data")
    new_folder.rmdir()


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a folder with the modes and owners of its files."""
    subprocess.run(["cp", "-a", str(source), str(target)], check=True, timeout=60)


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    """Start a new cluster. At the end of the block it is stopped and removed."""
    root = Path(tempfile.mkdtemp(prefix="seamark-pg-", dir=find_folder_in_memory()))
    try:
        data, config, password = root / "data", root / "postgresql.conf", root / "password"
        shutil.copyfile(CONFIG, config)  # The server's user may not have access to the checkout.
        password.write_text(PASSWORD)
        if os.geteuid() == 0:
            for path in (root, config, password):
                shutil.chown(path, "postgres", "postgres")
        _create_cluster(data, password)
        port = choose_free_port()
        argv = [_find_binary("postgres"), "-D", str(data), "-p", str(port), "-k", str(root), "-h", "127.0.0.1"]
        process = ManagedProcess(
            _run_as_server_user([*argv, "-c", f"config_file={config}"]), log=root / "postgres.log", cwd=root
        )
        server = Postgres(port, process)
        probe = [_find_binary("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
        try:
            process.start(lambda: subprocess.run(probe).returncode == 0, timeout_s=60)
            yield server
        finally:
            # SIGINT is a fast shutdown. SIGTERM would wait until every client disconnects.
            process.stop(first=signal.SIGINT)
    finally:
        shutil.rmtree(root, ignore_errors=True)
