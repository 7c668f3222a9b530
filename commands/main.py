"""`seamark`: the entry point of all commands.

All commands load the same settings; invalid settings end the command with one message and exit code 2. The modules of a
command are imported when it runs.
"""

from __future__ import annotations

import json
import platform
from typing import TYPE_CHECKING

import click

from seamark.commands.on_demand import DeferredCommand, DeferredGroup
from seamark.commands.options import json_option
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    from importlib import metadata
else:
    # Importing this module takes longer than importing all modules of Seamark.
    metadata = LazyModule("importlib.metadata")

_COMMANDS = {
    "serve": DeferredCommand(
        "seamark.commands.serving.serve:serve", "Run the server until SIGTERM or Ctrl-C.", "server"
    ),
    "demo": DeferredCommand(
        "seamark.commands.demo.demo:demo",
        "Look up one user before and after an index is built, then read rows while they arrive.",
        "demo",
    ),
    "token": DeferredCommand("seamark.commands.access:token", "Create, list and revoke bearer tokens.", "server"),
    "grant": DeferredCommand(
        "seamark.commands.access:grant", "Add, list and remove grants of roles and privileges.", "server"
    ),
    "role": DeferredCommand("seamark.commands.access:role", "List roles, and change their members.", "server"),
    "keys": DeferredCommand("seamark.commands.keys:keys", "Replace the keys that sign tokens.", "server"),
    "warehouse": DeferredCommand(
        "seamark.commands.catalog.warehouses:warehouse",
        "Create, list, show, change and drop further warehouses.",
    ),
    "namespace": DeferredCommand(
        "seamark.commands.catalog.namespaces:namespace",
        "List, show, create, change and drop namespaces.",
    ),
    "table": DeferredCommand(
        "seamark.commands.catalog.tables:table", "List, show, create, change, rename and drop tables."
    ),
    "view": DeferredCommand(
        "seamark.commands.catalog.views:view", "List, show, rename and drop views. Engines create views."
    ),
    "import": DeferredCommand(
        "seamark.commands.moving.import_tables:import_tables",
        "Register the tables and views of another catalog. Their files stay where they are.",
        "moving",
    ),
    "export": DeferredCommand(
        "seamark.commands.moving.export_tables:export_tables",
        "Register the tables and views in another catalog. Their files stay where they are.",
        "moving",
    ),
    "undrop": DeferredCommand(
        "seamark.commands.catalog.tables:undrop",
        "Restore the dropped table or view TABLE. Without TABLE, list the entries that can be restored.",
    ),
    "retained": DeferredCommand(
        "seamark.commands.catalog.retained:retained",
        "List and release dropped tables and views whose locations are still reserved.",
    ),
    "snapshot": DeferredCommand("seamark.commands.catalog.history:snapshot", "List and show snapshots of a table."),
    "timeline": DeferredCommand(
        "seamark.commands.catalog.history:timeline",
        "Show the latest instants of TABLE, or of everything that you have rights to read, oldest first.",
    ),
    "completion": DeferredCommand(
        "seamark.commands.installation.completion:completion",
        "Print the script that completes commands in SHELL.",
    ),
    "doctor": DeferredCommand(
        "seamark.commands.installation.doctor:doctor",
        "Check the installation, the warehouse, the server and the configurations of engines.",
    ),
    "connect": DeferredCommand(
        "seamark.commands.catalog.connect:connect",
        "Print a configuration with which ENGINE connects to the server: a command, a script or a file, ready to use.",
    ),
    "explain": DeferredCommand("seamark.commands.explain:explain", "Show how a scan of a table is planned."),
    "sql": DeferredCommand(
        "seamark.commands.sql.command:sql",
        "Run an SQL statement on a suitable engine, and print the rows.",
        "duckdb",
    ),
    "buckets": DeferredCommand(
        "seamark.commands.buckets:buckets", "Show the sizes of a table's buckets, or resize them."
    ),
    "index": DeferredCommand("seamark.commands.index:index", "Create, build, verify and list indexes."),
    "indexer": DeferredCommand(
        "seamark.commands.indexer:indexer", "Index the data files of all tables, until SIGTERM or Ctrl-C."
    ),
    "run": DeferredCommand(
        "seamark.commands.maintenance.run:run",
        "Run a maintenance job on a table: cluster, column-ttl, compact, drop-columns, expire, index, manifests, "
        "merge-files, orphan-files, split-buckets, statement, statistics.",
    ),
    "rollback": DeferredCommand(
        "seamark.commands.recovery.rollback:rollback",
        "Set the current snapshot of TABLE to the snapshot that was current at a time.",
    ),
    "rollback-job": DeferredCommand(
        "seamark.commands.maintenance.rollback:rollback_job", "Undo a compaction or a clustering of a table."
    ),
    "policy": DeferredCommand(
        "seamark.commands.maintenance.policy:policy",
        "List, show, set and drop policies, which say what table services do with a table.",
    ),
    "history": DeferredCommand(
        "seamark.commands.maintenance.query_history:history",
        "Show the shapes of the statements that read TABLE. Without TABLE, list the tables that are read most often.",
    ),
    "advise": DeferredCommand(
        "seamark.commands.maintenance.advise:advise",
        "Propose layouts, indexes and column TTLs of a table, based on the statements that read it.",
    ),
    "health": DeferredCommand("seamark.commands.maintenance.health:health", "Show the problems of a table."),
    "services": DeferredCommand("seamark.commands.maintenance.services:services", "List the jobs of table services."),
    "stream": DeferredCommand(
        "seamark.commands.maintenance.stream:stream",
        "List, show, flush, pause and drain stream tables, which accept single rows.",
    ),
    "replicas": DeferredCommand(
        "seamark.commands.maintenance.replicas:replicas",
        "List the replicas, which share a database and read files through each other.",
    ),
    "backup": DeferredCommand(
        "seamark.commands.recovery.backup:backup",
        "Copy the database to FILE while servers run.",
        "server",
    ),
    "restore": DeferredCommand(
        "seamark.commands.recovery.restore:restore", "Replace the database by the backup FILE.", "server"
    ),
    "rebuild": DeferredCommand(
        "seamark.commands.recovery.rebuild:rebuild",
        "Register the tables, views and functions that are in the warehouse, but not in the database.",
        "server",
    ),
    "migrate": DeferredCommand(
        "seamark.commands.recovery.migrate:migrate",
        "Copy the database to another database, for example from SQLite to PostgreSQL.",
        "server",
    ),
    "trino-proxy": DeferredCommand(
        "seamark.commands.trino_proxy:trino_proxy",
        "Run a proxy in front of Trino that rewrites statements so that they read fewer files.",
        "trino",
    ),
}


_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
"""The settings of all commands; click passes them on to subcommands."""


@click.group(context_settings=_CONTEXT, cls=DeferredGroup, deferred_commands=_COMMANDS)
@click.version_option(package_name="seamark", prog_name="seamark")
def cli() -> None:
    """Seamark: an Iceberg REST catalog that knows where the rows are.

    \b
    To try it on this machine without configuration:
      seamark serve --home ./seamark-home
    To run several processes with PostgreSQL and S3:
      seamark serve --workers 4 --warehouse s3://lake/warehouse \\
          --database postgresql://seamark@db/seamark
    Engines connect to the printed URL in the same way as to any Iceberg REST catalog.
    """


@cli.command()
@json_option
def version(as_json: bool) -> None:
    """Print the versions of Seamark and of Python."""
    seamark, python = metadata.version("seamark"), platform.python_version()
    click.echo(
        json.dumps({"seamark": seamark, "python": python}) if as_json else f"seamark {seamark} (Python {python})"
    )


def main() -> None:
    cli(prog_name="seamark")


if __name__ == "__main__":
    main()
