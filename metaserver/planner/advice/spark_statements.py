"""Writes the Spark statements of proposals, with quoted names."""

from __future__ import annotations


def quote_name(name: str) -> str:
    """Quote a name for a Spark statement with backticks, if it is not an identifier."""
    return name if name.isascii() and name.isidentifier() else "`" + name.replace("`", "``") + "`"


def quote_path(name: str) -> str:
    """Quote each part of a dotted name for a Spark statement."""
    return ".".join(map(quote_name, name.split(".")))


def format_partition_commands(table: str, transform: str, name: str) -> list[str]:
    """Return the Spark statements that add a partition field and rewrite the table.

    The rewrite is needed because a new field applies only to new files.

    Args:
        table: The dotted name of the table.
        transform: The transform as Spark writes it, with `{}` for the column.
        name: The name of the column.
    """
    field = transform.format(quote_path(name))
    literal = table.replace("'", "''")
    rewrite = f"CALL system.rewrite_data_files(table => '{literal}', options => map('rewrite-all', 'true'))"
    return [f"ALTER TABLE {quote_path(table)} ADD PARTITION FIELD {field}", rewrite]
