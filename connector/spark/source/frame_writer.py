"""An implementation of `df.write.format("seamark")` that includes modes and options which data sources do not get.

Spark passes only the modes `append` and `overwrite` to a Python data source. It runs the data source in separate
workers, whose errors the user sees only below a traceback of the JVM. Therefore `install` makes `save`, `saveAsTable`
and `insertInto` of PySpark's writer call this module for the format `seamark`. Spark handles all other formats. If a
write is refused, nothing was written, and the error is an AnalysisException with one sentence.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.readwriter import DataFrameWriter

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError, InvalidRequest, NoSuchResource
from seamark.connector.client.names import join_name, split_name
from seamark.connector.spark.frames.table_creation import create_for_frame, merge_schema, split_terms
from seamark.connector.spark.frames.writes import write
from seamark.connector.spark.scala import to_list
from seamark.connector.spark.source.options import parse_flag
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.iceberg.types.near_names import find_near_names

FORMAT = "seamark"
PROPERTY = "property."
"""The prefix of options that become properties of a new table."""
APPEND, OVERWRITE, PARTITIONS, ERROR, IGNORE = "append", "overwrite", "overwrite_partitions", "error", "ignore"
KEYED = ("upsert", "delete")
MODES = (APPEND, OVERWRITE, PARTITIONS, ERROR, IGNORE, *KEYED)
_SAVE_MODES = {"Append": APPEND, "Overwrite": OVERWRITE, "ErrorIfExists": ERROR, "Ignore": IGNORE}
_OPTIONS = frozenset(
    {
        *("uri", "token", "table", "path", "mode", "branch", "distribution", "merge-files"),
        *("replace-where", "replace-partitions", "partitionoverwritemode"),
        *("keys", "precombine", "columns", "row-mode", "strategy"),
        *("mergeschema", "partitioning"),
    }
)
_CATALOG = re.compile(r"spark\.sql\.catalog\.([^.]+)\.uri")
_REFUSED = re.compile(r"(?:Unwritable|BadRequest|InvalidRequest|Conflict|Refused): ([^\n]+)")


@dataclass(frozen=True)
class _Target:
    """The table to write, and its server."""

    client: SeamarkClient = field(repr=False)
    table: tuple[str, ...]


def install() -> None:
    """Make PySpark's DataFrameWriter use this module for the format `seamark`. Further calls change nothing."""
    for name, replacement in (("save", _save), ("saveAsTable", _save_as_table), ("insertInto", _insert_into)):
        spark_method = getattr(DataFrameWriter, name)
        if not hasattr(spark_method, "seamark"):
            setattr(DataFrameWriter, name, _dispatch(spark_method, replacement))


def _dispatch(original: Callable[..., None], replacement: Callable[..., None]) -> Callable[..., None]:
    """Return a method of DataFrameWriter that calls `replacement` for the format `seamark`, else `original`.

    `save` and `saveAsTable` may set the format by an argument, which is the second argument if it has no name. The
    attribute `seamark` shows that the method of DataFrameWriter is already replaced.
    """

    @functools.wraps(original)
    def method(writer: DataFrameWriter, *arguments: Any, **keywords: Any) -> None:
        if keywords.get("format") or (original.__name__ != "insertInto" and len(arguments) > 1 and arguments[1]):
            writer.format(keywords.pop("format", None) or arguments[1])
        if str(writer._jwrite.source()).lower() != FORMAT:
            original(writer, *arguments, **keywords)
            return
        with convert_refusals():
            replacement(writer, *arguments, **keywords)

    method.seamark = True  # type: ignore[attr-defined]
    return method


@contextmanager
def convert_refusals() -> Iterator[None]:
    """Convert errors with which Seamark refuses a write to an AnalysisException with the same message.

    An error in a Spark task arrives as text in an error of Spark. The message of Seamark is taken from this text.
    """
    try:
        yield
    except (Unwritable, ValueError, ClientError) as error:
        raise AnalysisException(message=str(error)) from None
    except (PySparkException, Py4JError) as error:
        match = _REFUSED.search(str(error))
        if match is None:
            raise
        raise AnalysisException(message=match[1].strip()) from None


# Spark's methods


def _save(
    writer: DataFrameWriter,
    path: str | None = None,
    format: str | None = None,
    mode: str | None = None,
    partitionBy: str | list[str] | None = None,  # noqa: N803
    **options: Any,
) -> None:
    _prepare(writer, mode, partitionBy, options)
    _write(writer, path)


def _save_as_table(
    writer: DataFrameWriter,
    name: str,
    format: str | None = None,
    mode: str | None = None,
    partitionBy: str | list[str] | None = None,  # noqa: N803
    **options: Any,
) -> None:
    _prepare(writer, mode, partitionBy, options)
    _write(writer, name)


def _insert_into(writer: DataFrameWriter, tableName: str, overwrite: bool | None = None) -> None:  # noqa: N803
    """Write the rows to an existing table. Unlike in Spark's own `insertInto`, columns are matched by name."""
    if overwrite is not None:
        writer.mode("overwrite" if overwrite else "append")
    elif _get_save_mode(writer) == ERROR:
        writer.mode("append")
    _write(writer, tableName, must_exist=True)


def _prepare(writer: DataFrameWriter, mode: str | None, partition_by: Any, options: Mapping[str, Any]) -> None:
    """Set the arguments of `save` or `saveAsTable` on the writer."""
    writer.mode(mode).options(**options)
    if partition_by is not None:
        writer.partitionBy(partition_by)


def _get_save_mode(writer: DataFrameWriter) -> str:
    return _SAVE_MODES[str(writer._jwrite.curmode())]


def _write(writer: DataFrameWriter, name: str | None, *, must_exist: bool = False) -> None:
    """Write the rows of the writer's DataFrame with the writer's mode, options and partitioning."""
    jvm_writer = writer._jwrite
    raw_options = {
        str(option._1()): str(option._2()) for option in to_list(jvm_writer.extraOptions().originalMap().toSeq())
    }
    options = {key if key.startswith(PROPERTY) else key.lower(): value for key, value in raw_options.items()}
    columns = jvm_writer.partitioningColumns()
    partitions = [str(column) for column in to_list(columns.get())] if columns.isDefined() else []
    save(writer._df, name, _get_save_mode(writer), options, partitions, must_exist=must_exist)


# The write


def save(
    df: DataFrame,
    name: str | None,
    save_mode: str,
    options: Mapping[str, str],
    partition_by: Sequence[str] = (),
    *,
    must_exist: bool = False,
) -> None:
    """Write the rows of a DataFrame.

    Args:
        df: The DataFrame.
        name: The name of the table, or None if the option `table` contains it.
        save_mode: The mode of the writer. The option `mode` takes precedence.
        options: The options, by their names in lower case.
        partition_by: The partitioning of a new table.
        must_exist: Whether the table must exist.
    """
    unknown = sorted(name for name in options.keys() - _OPTIONS if not name.startswith(PROPERTY))
    if unknown:
        option_names = ", ".join(sorted(_OPTIONS - {"path"}))
        raise InvalidRequest(
            f"Unknown options {', '.join(unknown)}; the options are {option_names}, and {PROPERTY}… for a new table"
        )
    mode = options.get("mode", save_mode).lower().replace("errorifexists", ERROR).replace("-", "_")
    if mode not in MODES:
        raise InvalidRequest(f"mode is {mode!r}; it must be {', '.join(MODES)}")
    if "keys" in options and mode not in KEYED:
        raise InvalidRequest(f"keys require option('mode', 'upsert') or 'delete'; the mode is {mode}")
    target = _find_target(df.sparkSession, name or options.get("table") or options.get("path"), options)
    exists = _table_exists(target)
    if exists and mode == ERROR:
        text = join_name(target.table)
        raise InvalidRequest(
            f"Table {text} exists; use mode('append'), 'overwrite' or 'ignore', or choose another name"
        )
    if exists and mode == IGNORE:
        return
    if not exists:
        if must_exist or mode == "delete":
            raise InvalidRequest(
                _explain_not_found(df.sparkSession, target, f"Table {join_name(target.table)} does not exist")
            )
        _create(df, target, options, partition_by)
    elif parse_flag(options, "mergeschema", False):
        merge_schema(target.client, target.table, df.schema)
    write(df, target.table, client=target.client, **_read_arguments(options, mode))


def _read_arguments(options: Mapping[str, str], mode: str) -> dict[str, Any]:
    """Return the arguments of `frames.writes.write` for these options.

    Args:
        options: The options of the writer, with names in lower case.
        mode: The mode of the writer. Modes that change rows by key (`KEYED`) have other options than all others.

    Raises:
        InvalidRequest: Options cannot be combined, or a value is unknown.
    """
    arguments: dict[str, Any] = {"branch": options.get("branch", MAIN)}
    if mode in KEYED:
        arguments |= {key: _parse_list(options[key]) for key in ("keys", "columns") if key in options}
        arguments |= {key: options[key] for key in ("precombine", "strategy") if key in options}
        arguments |= {"row_mode": options["row-mode"]} if "row-mode" in options else {}
        return {"mode": mode, **arguments}
    if "distribution" in options:
        arguments["distribution"] = options["distribution"]
    arguments["merge_files"] = parse_flag(options, "merge-files", False)
    overwrite_mode = options.get("partitionoverwritemode", "static").lower()
    if overwrite_mode not in ("static", "dynamic"):
        raise InvalidRequest(f"partitionOverwriteMode is {overwrite_mode!r}; it must be static or dynamic")
    by_partition = mode == PARTITIONS or parse_flag(options, "replace-partitions", overwrite_mode == "dynamic")
    if mode not in (OVERWRITE, PARTITIONS):
        if "replace-where" in options or "replace-partitions" in options:
            raise InvalidRequest("replace-where and replace-partitions require mode('overwrite')")
        return {"mode": APPEND, **arguments}
    if by_partition and "replace-where" in options:
        raise InvalidRequest("replace-where and replace-partitions are both set; set only one of them")
    if by_partition:
        return {"mode": PARTITIONS, **arguments}
    return {"mode": OVERWRITE, "where": options.get("replace-where", True), **arguments}


def _parse_list(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _table_exists(target: _Target) -> bool:
    try:
        target.client.load_table(target.table)
    except NoSuchResource:
        return False
    return True


def _create(df: DataFrame, target: _Target, options: Mapping[str, str], partition_by: Sequence[str]) -> None:
    terms = [*partition_by, *split_terms(options.get("partitioning", ""))]
    properties = {key.removeprefix(PROPERTY): value for key, value in options.items() if key.startswith(PROPERTY)}
    try:
        create_for_frame(target.client, target.table, df.schema, partitioning=terms, properties=properties)
    except NoSuchResource as error:
        raise InvalidRequest(_explain_not_found(df.sparkSession, target, error.message)) from None


# Names


def list_catalogs(spark: SparkSession) -> list[str]:
    """Return the names of the session's catalogs that have a server."""
    return sorted(match[1] for name in spark.conf.getAll if (match := _CATALOG.fullmatch(name)))


def _find_target(spark: SparkSession, name: str | None, options: Mapping[str, str]) -> _Target:
    """Return the table to write.

    Its server is the option `uri`, or else the server of the catalog in its name, or else that of SEAMARK_URL.

    Raises:
        InvalidRequest: The name is missing, or no server is known.
    """
    if not name:
        raise InvalidRequest("Give the table: save('db.events'), or option('table', 'db.events')")
    levels = split_name(name.replace("`", ""))
    catalog_names, uri = list_catalogs(spark), options.get("uri")
    if uri is None and levels[0] in catalog_names:
        conf = f"spark.sql.catalog.{levels[0]}"
        token = options.get("token") or str(spark.conf.get(f"{conf}.token", "") or "")
        return _Target(SeamarkClient(str(spark.conf.get(f"{conf}.uri")), token=token or None), levels[1:])
    uri = uri or os.environ.get("SEAMARK_URL")
    if not uri:
        raise InvalidRequest(
            f"{name!r} is in no catalog of this session: {make_catalog_hint(levels[0], catalog_names)}"
        )
    return _Target(SeamarkClient(uri, token=options.get("token")), levels)


def make_catalog_hint(first_level: str, catalog_names: Sequence[str]) -> str:
    """Return a hint for a table name that does not begin with the name of a catalog.

    Args:
        first_level: The first level of the table name.
        catalog_names: The catalogs of the session.
    """
    if not catalog_names:
        return "give option('uri', …), the server's address, or add a catalog with seamark.spark.connect"
    similar_names = find_near_names(first_level, catalog_names, maximum=1)
    question = f"did you mean {similar_names[0]!r}? " if similar_names else ""
    return (
        f"{question}The session has the catalogs {', '.join(catalog_names)}; or give option('uri', …), the server's "
        "address"
    )


def _explain_not_found(spark: SparkSession, target: _Target, message: str) -> str:
    """Return the message of a table that was not found, with the right name if the name begins with a catalog.

    With the option `uri`, the server is already known, so the name must not contain a catalog of the session.
    """
    if target.table[0] in list_catalogs(spark):
        table_name = join_name(target.table[1:])
        return (
            f"{message}. {target.table[0]} is a catalog of this session: with option('uri', …) the name is {table_name}"
        )
    return message
