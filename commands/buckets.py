"""`seamark buckets`: shows the buckets of a table, and changes their number.

The command finds the server in the same way as `seamark explain`. Exit codes: 0 on success, 1 if the server refuses or
cannot be reached, 2 for invalid arguments, such as a number of buckets that is not the present one times a power of
two.
"""

from __future__ import annotations

from typing import Any

import click

from seamark.commands.connecting import server_command
from seamark.commands.terminal import (
    make_table,
    open_console,
    print_json,
    print_result,
    say,
    show_count,
    show_size,
)
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.write.buckets import TARGET_BYTES, BucketSizes, compute_bucket_sizes, resize


@click.command()
@click.argument("table")
@click.option(
    "--column",
    help="Column whose buckets are shown or resized. It is required for a resize if several columns have buckets. "
    "Default: all columns with buckets.",
)
@click.option("--resize", "new_buckets", type=click.IntRange(min=1), metavar="N", help="New number of buckets.")
@click.option("--double", is_flag=True, help="Double the number of buckets.")
@click.option(
    "--target-bytes",
    type=click.IntRange(min=1),
    default=TARGET_BYTES,
    show_default=True,
    metavar="BYTES",
    help="Target size of a bucket, from which the recommended number is computed.",
)
@server_command
def buckets(
    client: SeamarkClient,
    table: str,
    column: str | None,
    new_buckets: int | None,
    double: bool,
    target_bytes: int,
    as_json: bool,
) -> None:
    """Show the sizes of the buckets of TABLE and the recommended number of buckets, or resize the buckets.

    \b
    For instance:
      seamark buckets sales.orders
      seamark buckets sales.orders --double
    A resize only changes the partition spec. It is one commit: readers and writers continue, and existing files do not
    change. TABLE is a namespace and a name, joined by dots; write a dot within a name as \\. .
    """
    if double and new_buckets is not None:
        raise click.UsageError("--double and --resize cannot be used together: use one of them")
    sizes = compute_bucket_sizes(client, table, target_bytes=target_bytes)
    shown_sizes = [size for size in sizes if column in (None, size.column)]
    if not shown_sizes:
        existing = f"buckets of {', '.join(size.column for size in sizes)} only" if sizes else "no buckets"
        raise InvalidRequest(
            f"{table} has {existing}; add a partition field bucket(8, {column or 'id'}) with an engine"
        )
    if double or new_buckets is not None:
        result = resize(client, table, buckets=new_buckets or 2 * shown_sizes[0].buckets, column=column)
        unchanged_note = "" if result.former_buckets != result.buckets else ", as before"
        count = show_count(result.buckets, "bucket")
        text = f"{result.column}: {count} from now on{unchanged_note} (partition spec {result.spec_id})"
        print_result(result, text, as_json=as_json)
    elif as_json:
        print_json([_to_json(size) for size in shown_sizes])
    else:
        _print_sizes(table, shown_sizes)


def _to_json(sizes: BucketSizes) -> dict[str, Any]:
    bucket_sizes = zip(*(part.tolist() for part in (sizes.files, sizes.rows, sizes.bytes)), strict=True)
    return {
        "column": sizes.column,
        "field": sizes.field,
        "buckets": sizes.buckets,
        "advice": sizes.advice,
        "target-bytes": sizes.target_bytes,
        "partition-bytes": sizes.partition_bytes,
        "skew": round(sizes.skew, 3),
        "shared-files": sizes.shared_files,
        "shared-bytes": sizes.shared_bytes,
        "sizes": [{"files": files, "rows": rows, "bytes": size} for files, rows, size in bucket_sizes],
    }


def _print_sizes(table: str, columns: list[BucketSizes]) -> None:
    sizes_table = make_table(
        ("column", "buckets", "files", "smallest", "mean", "largest", "skew", "advice"),
        (
            (
                sizes.column,
                f"{sizes.buckets:,}",
                f"{sizes.files.mean():,.1f} each",
                *(show_size(int(size)) for size in (sizes.bytes.min(), sizes.bytes.mean(), sizes.bytes.max())),
                f"{sizes.skew:.1f}",
                f"{sizes.advice:,}",
            )
            for sizes in columns
        ),
        right_aligned_headers=("buckets", "files", "smallest", "mean", "largest", "skew", "advice"),
    )
    open_console().print(sizes_table)
    for sizes in columns:
        if sizes.shared_files:
            share = f"{show_count(sizes.shared_files, 'file')} ({show_size(sizes.shared_bytes)})"
            description = f"with rows of several buckets of {sizes.column}"
            say(f"{share} {description} in older partition specs.")
        if sizes.advice > sizes.buckets:
            bucket_size = show_size(round(sizes.partition_bytes / sizes.advice))
            column_option = "" if len(columns) == 1 else f" --column {sizes.column}"
            command = f"seamark buckets {table}{column_option} --resize {sizes.advice}"
            say(f"For buckets of about {bucket_size} each, run: {command}")
