"""Routes of the timeline: read, long-poll and event stream.

Namespaces in paths have the form of the Iceberg REST specification: levels joined by 0x1F (`%1F`). Field names are in
kebab-case, as in the specification. `since` is a position from an earlier answer. A reader that continues with
`next-since` misses no instant, with any number of replicas.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Annotated

import msgspec
import structlog
from aiohttp import web

from seamark.formats.protocol.wire import check_name, encode_json, format_path
from seamark.formats.runtime.decoding import convert_attributes
from seamark.formats.runtime.errors import BadRequest, Forbidden, NoSuchTable, SeamarkError, Unauthenticated
from seamark.metaserver.access.rights.decisions import WAREHOUSE, Securable
from seamark.metaserver.api.http.describe import Parameter, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Answer, Call, Check, Route
from seamark.metaserver.api.http.errors import encode_error_body
from seamark.metaserver.api.http.parameters.paging import parse_page_size
from seamark.metaserver.store.model import POSITION, EntryKind, Instant, InstantState, NamespacePath
from seamark.metaserver.store.port import InstantFilter, PointerStore
from seamark.metaserver.timeline.events import InstantAnswer
from seamark.metaserver.timeline.timeline import Timeline, Watcher

_log = structlog.get_logger("seamark.timeline")
_STATES = frozenset(state.value for state in InstantState)
LATEST = "latest"
EVENT_STREAM = "text/event-stream"
HEARTBEAT_S = 15.0
"""The interval between comments on an idle stream, in seconds.

Because of the comments, proxies do not close the stream, and the server detects closed connections.
"""
INSTANTS_PER_PAGE_DEFAULT = 100
_SSE_INSTANTS_PER_BATCH = 100


class InstantPage(msgspec.Struct, frozen=True, rename="kebab"):
    """One page of instants."""

    instants: list[InstantAnswer]
    next_since: Annotated[
        str | None,
        doc(
            "The value of `since` for the next request. With the newest instant first, it is null if the first instant "
            "was reached. With the oldest instant first, it is null if there is no instant yet."
        ),
    ]


_FILTERS = (
    Parameter(
        "since",
        "query",
        "The position after which the answer begins. The default is the beginning of the timeline. With `latest`, the "
        "answer contains only later instants.",
        {"type": "string"},
    ),
    Parameter(
        "limit",
        "query",
        f"The maximum number of instants. The default is {INSTANTS_PER_PAGE_DEFAULT}.",
        {"type": "integer", "minimum": 1},
    ),
    Parameter("action", "query", "Only instants of this action.", {"type": "string"}),
    Parameter("state", "query", "Only instants in this state.", {"enum": [state.value for state in InstantState]}),
    Parameter(
        "order", "query", "The order: `asc` for oldest first, the default, or `desc`.", {"enum": ["asc", "desc"]}
    ),
    Parameter(
        "wait",
        "query",
        "The seconds to wait for a matching instant (long-poll), at most the setting watch_timeout_s.",
        {"type": "number", "minimum": 0},
    ),
    Parameter("Last-Event-ID", "header", "The same as `since`, for event streams.", {"type": "string"}),
)
_ANSWERS = (
    ResponseSpec(
        200, "The instants in order. With `Accept: text/event-stream`, the answer is a stream of events.", InstantPage
    ),
)


@Route(
    "GET",
    "/api/v1/timeline",
    "listTimeline",
    "Read the timeline of the catalog: list, read from a position, long-poll, or stream",
    check=Check.CATALOG,
    tags=("timeline",),
    parameters=_FILTERS,
    answers=_ANSWERS,
    waits=True,
    streams=True,
)
async def list_timeline(call: Call) -> Answer:
    """Read the timeline of the catalog: list, read from a position, long-poll, or stream."""
    return await _answer_instants(call, InstantFilter(), WAREHOUSE)


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/timeline",
    "listTableTimeline",
    "Read the timeline of a table or view under all its names, or of a name that no longer exists",
    tags=("timeline",),
    parameters=_FILTERS,
    answers=(*_ANSWERS, ResponseSpec(404, "No table or view has or had this name")),
    waits=True,
    streams=True,
)
async def list_table_timeline(call: Call) -> Answer:
    """Read the timeline of a table or view under all its names, or of a name that no longer exists."""
    return await _answer_instants(
        call, await _filter_by_entry(call.components.store, call.namespace, call.name), call.securable
    )


async def _filter_by_entry(store: PointerStore, namespace: NamespacePath, name: str) -> InstantFilter:
    """Return a filter for the instants, the recorded actions, of a table or view.

    If the name exists, the filter has the UUID of the entry, so that the timeline includes its earlier names.
    Otherwise, the filter has the name.

    Raises:
        NoSuchTable: No table or view has or had the name.
    """
    for kind in (EntryKind.TABLE, EntryKind.VIEW):
        entry = await store.load_entry(kind, namespace, name)
        if entry is not None:
            return InstantFilter(uuid=entry.uuid)
    instant_filter = InstantFilter(namespace=namespace, name=name)
    if not await store.list_instants(instant_filter, 1):
        raise NoSuchTable(f"Table does not exist: {format_path(namespace, name)}")
    return instant_filter


async def _answer_instants(call: Call, instant_filter: InstantFilter, securable: Securable) -> Answer:
    """Answer with the instants, the recorded actions, that match `instant_filter`: as a list or as an event stream.

    A list may wait for new instants. After the wait, the caller's rights on `securable` are checked again.
    """
    timeline = call.components.timeline
    instant_filter, limit, wait_s = _read_query(call, instant_filter)
    if instant_filter.since == LATEST:
        instant_filter = msgspec.structs.replace(instant_filter, since=await timeline.load_head())
    if EVENT_STREAM in call.headers.get("Accept", ""):
        return await _stream_instants(call, timeline, instant_filter, securable)
    if wait_s > 0:
        instants = await timeline.watch(instant_filter, limit, wait_s)
        await call.recheck(securable)  # A token may have expired during the wait.
    else:
        instants = await timeline.read(instant_filter, limit)
    next_since = instants[-1].position if instants else (None if instant_filter.newest_first else instant_filter.since)
    visible_instants = [await _show_instant(call, instant) for instant in await _select_visible(call, instants)]
    return InstantPage(visible_instants, next_since)


async def _select_visible(call: Call, instants: list[Instant]) -> list[Instant]:
    """Return the instants of tables, views and namespaces that the caller may browse."""
    return await call.select(instants, lambda instant: Securable(instant.namespace, instant.kind.value, instant.name))


async def _show_instant(call: Call, instant: Instant) -> InstantAnswer:
    """Return an instant in the form of an answer.

    If an entry was renamed, and the caller may not browse an entry with the new name, the new name is left out.
    """
    answer = convert_attributes(instant, InstantAnswer)
    if "to" not in instant.summary:
        return answer
    # Older instants do not contain the levels of the new namespace. Their new name is shown only to callers that may
    # read the timeline of the whole catalog.
    levels = instant.summary.get("to-namespace")
    if levels is None:
        is_visible = await call.may(WAREHOUSE, "listTimeline")
    else:
        namespace = tuple(levels)
        name = instant.summary["to"].removeprefix(format_path(namespace, ""))
        is_visible = await call.may(Securable(namespace, instant.kind.value, name))
    if is_visible:
        return answer
    summary = {name: value for name, value in answer.summary.items() if name not in ("to", "to-namespace")}
    return msgspec.structs.replace(answer, summary=summary)


def _read_query(call: Call, instant_filter: InstantFilter) -> tuple[InstantFilter, int, float]:
    """Return the filter, the limit, and the seconds to wait from the query of a request.

    Raises:
        BadRequest: A parameter is invalid; the message names it and its allowed values.
    """
    query = call.query
    settings = call.components.settings
    wants_stream = EVENT_STREAM in call.headers.get("Accept", "")
    since = (call.headers.get("Last-Event-ID") if wants_stream else None) or query.get("since")
    if since not in (None, LATEST) and not POSITION.fullmatch(since):
        raise BadRequest(f"since is {since[:40]!r}, which this server did not issue; omit it to start again")
    action = query.get("action")
    if action is not None:
        check_name(action, "action")
    state = query.get("state")
    if state is not None and state not in _STATES:
        raise BadRequest(f"state is {state[:40]!r}; it must be one of {', '.join(InstantState)}")
    order = query.get("order", "asc")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order is {order[:40]!r}; it must be asc or desc")
    wait_s = _parse_seconds(query.get("wait", "0"), "wait")
    if order == "desc" and (wait_s > 0 or wants_stream):
        raise BadRequest("order=desc cannot wait for new instants; omit order or the wait")
    limit = parse_page_size(query.get("limit", str(INSTANTS_PER_PAGE_DEFAULT)), "limit", settings.page_limit)
    instant_filter = msgspec.structs.replace(
        instant_filter,
        since=since,
        action=action,
        state=InstantState(state) if state is not None else None,
        newest_first=order == "desc",
    )
    return instant_filter, limit, min(wait_s, settings.watch_timeout_s)


def _parse_seconds(text: str, name: str) -> float:
    """Return a number of seconds from the query.

    Raises:
        BadRequest: The text is not a number, or the number is negative.
    """
    try:
        number = float(text)
    except ValueError:
        raise BadRequest(f"{name} is {text[:40]!r}; it must be a number of seconds") from None
    if not math.isfinite(number) or number < 0:
        raise BadRequest(f"{name} is {text[:40]!r}; it must be a number of seconds, 0 or more")
    return number


async def _stream_instants(
    call: Call, timeline: Timeline, instant_filter: InstantFilter, securable: Securable
) -> web.StreamResponse:
    """Send server-sent events (WHATWG HTML, 9.2) until the connection or the server closes.

    The login and the rights are checked before each write, and also every `rights_recheck_s`. If the login ends or the
    rights are lost, the stream ends with an event `error` that contains the refusal.
    """
    async with timeline.watch_instants(instant_filter) as watcher:
        response = web.StreamResponse(
            headers={
                "Content-Type": f"{EVENT_STREAM}; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
                "X-Request-Id": call.request_id,
                "Server": "seamark",
            }
        )
        await response.prepare(call.request)
        try:
            await response.write(b"retry: 1000\n\n")  # A client reconnects after 1,000 ms.
            while not call.components.drain.is_set():
                instants = await _await_instants(call, timeline, watcher, securable)
                await response.write(await _encode_events(call, await _select_visible(call, instants)))
        except ConnectionError:
            pass  # The client has closed the connection, as most streams end.
        except (Unauthenticated, Forbidden) as error:
            _log.info("event stream ends", error=error.message, request_id=call.request_id)
            with suppress(ConnectionError):
                await response.write(
                    b"event: error\ndata: %b\n\n" % encode_error_body(error.code, error.type, error.message)
                )
        except SeamarkError as error:
            # The status was already sent. The client reconnects with Last-Event-ID, and then receives the error.
            _log.warning("event stream ends", error=error.message, request_id=call.request_id)
        return response


async def _await_instants(call: Call, timeline: Timeline, watcher: Watcher, securable: Securable) -> list[Instant]:
    """Return the next instants, or an empty list if no instant arrives within HEARTBEAT_S.

    The login and the rights are checked before instants are returned.

    Raises:
        Unauthenticated: The login has ended.
        Forbidden: The caller has lost the right to see this timeline.
    """
    clock, pause_s = call.components.clock, call.components.settings.rights_recheck_s
    until_s = clock.monotonic() + HEARTBEAT_S
    instants: list[Instant] = []
    while not instants and (remaining_s := until_s - clock.monotonic()) > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(pause_s, remaining_s)):
                instants = await timeline.read_next(watcher, _SSE_INSTANTS_PER_BATCH)
        await call.recheck(securable)
        if call.components.drain.is_set():
            break
    return instants


async def _encode_events(call: Call, instants: list[Instant]) -> bytes:
    """Return instants as server-sent events, or a comment that keeps the connection open."""
    if not instants:
        return b": still here\n\n"
    events = []
    for instant in instants:
        data = encode_json(await _show_instant(call, instant))
        events.append(b"id: %b\nevent: instant\ndata: %b\n\n" % (instant.position.encode(), data))
    return b"".join(events)
