"""A client that plans a whole table and fetches its pages one after another, as a separate process.

`python -m bench.planning.pages PORT TABLE-PATH [--gzip]` prints JSON with the number of files, the bytes received, and
the milliseconds of all pages and of the longest page.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time

import uvloop

from bench.wire import Connection, LoadError, Response, build_request

FILE = b'"data-file":'


async def fetch_all(port: int, table: str, *, is_packed: bool) -> dict[str, float]:
    """Request a plan of all files, and then each plan task.

    Raises:
        LoadError: The server answered with an error.
    """
    headers = {"Accept-Encoding": "gzip"} if is_packed else {}
    connection = await Connection.open(port)
    durations: list[float] = []

    async def ask(path: str, body: object) -> Response:
        started_s = time.perf_counter()
        answer = await connection.ask(build_request("POST", f"{table}/{path}", body, headers=headers))
        durations.append((time.perf_counter() - started_s) * 1000)
        if answer.status != 200:
            raise LoadError(f"{path}: {answer.status} {answer.body[:300]!r}")
        return answer

    first = await ask("plan", {})
    tasks = json.loads(_decompress(first)).get("plan-tasks", [])
    answers = [first, *[await ask("tasks", {"plan-task": task}) for task in tasks]]
    connection.close()
    return {
        "files": sum(_decompress(answer).count(FILE) for answer in answers),
        "bytes": sum(len(answer.body) for answer in answers),
        "ms": sum(durations),
        "page_ms": max(durations),
        "pages": len(tasks),
    }


def _decompress(answer: Response) -> bytes:
    return gzip.decompress(answer.body) if answer.get_field("Content-Encoding") == "gzip" else answer.body


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planning.pages", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("table", help="path of the table, /v1/namespaces/…/tables/…")
    parser.add_argument("--gzip", action="store_true")
    arguments = parser.parse_args()
    print(json.dumps(uvloop.run(fetch_all(arguments.port, arguments.table, is_packed=arguments.gzip))))


if __name__ == "__main__":
    main()
