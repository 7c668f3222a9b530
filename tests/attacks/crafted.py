"""Attacks of several steps with metadata, manifests and data files that a hostile writer makes for its own tables."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from tests.api.client import VIEW_VERSION, Answer
from tests.attacks.campaign import AttackCampaign
from tests.attacks.signing import sign_everything
from tests.attacks.world import EVIL, NAMES, SCHEMA
from tests.planner.lakes.kinds import to_bytes
from tests.planner.lakes.lake import DataFile
from tests.planner.lakes.manifests import (
    ADDED,
    DELETED,
    EXISTING,
    Entry,
    Manifest,
    Style,
    build_manifest_bytes,
    encode_manifest_list,
)
from tests.planner.lakes.metrics import ColumnMetrics

ATTACKER_TABLES = f"/api/v1/tables/{EVIL}"
STYLE = Style(has_shuffled_fields=False, sparse=False, codec="deflate", old_names=False, summaries=False, seed=0)
FIELD_TYPES = {1: "long", 2: "string", 3: "string", 4: "long"}
PURGED_PREFIXES = ("over", "base", "statistics", "recreated", "swapped", "nameless")
"""The prefixes of the names of tables that attacks drop, so that they can purge them afterwards."""
SNAPSHOT_ID = 7
"""The id of the snapshot that an attacker commits."""
MISSING_FILE_BYTES = 4000
"""The stated length of a file that does not exist."""
CANARY = "https://canary.evil.example"
STEALING_METADATA = (
    *("s3.signer.uri", "s3.signer", "s3.signer.endpoint", "py-io-impl", "io-impl", "s3.endpoint", "token"),
    *("credential", "oauth2-server-uri", "header.x-canary", "client.factory", "rest.auth.type", "uri", "s3.proxy-uri"),
    *("rest.signer.uri", "adls.connection-string", "gcs.service.host", "metrics-reporter-impl", "auth.type"),
    *(
        "s3.access-key-id",
        "write.location-provider.impl",
        "S3.Signer.Uri",
        " s3.signer.uri",
        "client.region ",
        "catalog-impl",
    ),
)
"""Properties that decide where a client sends its secrets, or which code it loads."""


async def create_table(campaign: AttackCampaign, name: str, principal: str = "mallory", **options: Any) -> Answer:
    return await campaign.ask(principal, "POST", f"{NAMES}/tables", {"name": name, "schema": SCHEMA, **options})


def build_data_file(path: str, low: int, high: int, size: int = 1000, rows: int = 3) -> DataFile:
    metrics = {1: ColumnMetrics(rows, 0, None, to_bytes("long", low), to_bytes("long", high))}
    return DataFile(path, 0, "PARQUET", 0, (), rows, size, metrics, split_offsets=[4])


def write_own_parquet(campaign: AttackCampaign, path: str, ids: Sequence[int]) -> DataFile:
    """Write a Parquet file with these ids at a path of the attacker's table, and return its manifest entry."""
    out = io.BytesIO()
    count = len(ids)
    columns = [pa.array(ids, pa.int64()), pa.array(["x"] * count), pa.array(["y"] * count), pa.array(ids, pa.int64())]
    fields = [
        pa.field(field["name"], column.type, metadata={"PARQUET:field_id": str(field["id"])})
        for field, column in zip(SCHEMA["fields"], columns, strict=True)  # type: ignore[arg-type]
    ]
    pq.write_table(pa.table(columns, schema=pa.schema(fields)), out)
    campaign.world.write(path, out.getvalue())
    return build_data_file(path, min(ids), max(ids), len(out.getvalue()), count)


def write_manifest(campaign: AttackCampaign, path: str, files: Sequence[Any], *, content: int = 0) -> Manifest:
    entries = [Entry(ADDED, SNAPSHOT_ID, None, None, file) for file in files]
    data = build_manifest_bytes(
        entries, version=2, content=content, style=STYLE, spec_id=0, fields=(), kinds=FIELD_TYPES, schema=SCHEMA
    )
    campaign.world.write(path, data)
    return build_list_entry(path, len(data), content)


def build_list_entry(path: str, length: int, content: int = 0) -> Manifest:
    """Return the row of a manifest list for a manifest that adds one file with three rows."""
    counts = {ADDED: (1, 3), EXISTING: (0, 0), DELETED: (0, 0)}  # (files, rows) by status
    return Manifest(
        path,
        length,
        content,
        spec_id=0,
        sequence=1,
        min_sequence=1,
        snapshot_id=SNAPSHOT_ID,
        entries=[],
        partitions=None,
        counts=counts,
    )


def write_manifest_list(campaign: AttackCampaign, path: str, manifests: Sequence[Manifest]) -> str:
    header = {"format-version": "2"}
    campaign.world.write(
        path, encode_manifest_list([(manifest, None) for manifest in manifests], version=2, style=STYLE, header=header)
    )
    return path


async def commit_snapshot(
    campaign: AttackCampaign, name: str, manifest_list: str, snapshot_id: int = SNAPSHOT_ID
) -> Answer:
    """Commit a snapshot with this manifest list as the attacker, in three of ten cases in a transaction."""
    snapshot = {
        "snapshot-id": snapshot_id,
        "sequence-number": 1,
        "timestamp-ms": campaign.world.server.components.clock.now_ms(),
        "manifest-list": manifest_list,
        "summary": {"operation": "append"},
        "schema-id": 0,
    }
    ref = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id}
    body = {"requirements": [], "updates": [{"action": "add-snapshot", "snapshot": snapshot}, ref]}
    if campaign.rng.random() < 0.3:
        change = {"identifier": {"namespace": [EVIL], "name": name}, **body}
        return await campaign.ask("mallory", "POST", "/v1/transactions/commit", {"table-changes": [change]})
    return await campaign.ask("mallory", "POST", f"{NAMES}/tables/{name}", body)


async def read_table_in_all_ways(campaign: AttackCampaign, name: str) -> None:
    """Send every request that makes the server read files of one of the attacker's tables.

    These requests also create a stored plan, an index and an index build, and rebuild the list of index files.
    """
    table_path, principal = f"{ATTACKER_TABLES}/{name}", campaign.rng.choice(("mallory", "riley"))
    await campaign.ask(principal, "GET", f"{NAMES}/tables/{name}")
    stats = {"stats-fields": ["id", "data", "part", "amount"]}
    scan = await campaign.ask(principal, "POST", f"{NAMES}/tables/{name}/plan", stats)
    if scan.status == 200:
        for task in scan.json.get("plan-tasks", ()):
            await campaign.ask(principal, "POST", f"{NAMES}/tables/{name}/tasks", {"plan-task": task})
    for route in (
        "files",
        "partitions",
        "stats/id",
        "stats/data",
        "stats/part",
        "stats/amount",
        "indexes",
        "timeline",
    ):
        await campaign.ask(principal, "GET", f"{table_path}/{route}")
    await campaign.ask(
        principal, "GET", f"{table_path}/stats/id", headers={"Accept": "application/vnd.apache.arrow.stream"}
    )
    await campaign.ask(principal, "POST", f"{table_path}/explain", {"where": "id > 0", "files": True})
    await campaign.ask(principal, "POST", f"{table_path}/lookup", {"columns": ["id"], "keys": [[1]]})
    await campaign.ask(principal, "POST", f"{table_path}/bitmap", {"where": "id > 0", "deletes": True})
    answer = await campaign.ask(principal, "POST", f"{table_path}/plan-tables", {"predicate": "id > 0"})
    if answer.status == 200 and answer.json["name"]:
        plan = quote(answer.json["name"], safe="")
        loaded_table = await campaign.ask(principal, "GET", f"{NAMES}/tables/{plan}")
        await campaign.ask(principal, "POST", f"{NAMES}/tables/{plan}/plan", stats)
        if loaded_table.status == 200:
            search_storage(campaign, loaded_table.json["metadata"]["snapshots"][-1]["manifest-list"])
    await campaign.ask("mallory", "PUT", f"{table_path}/indexes/i", {"kind": "bloom", "columns": ["id"]})
    await campaign.ask("mallory", "POST", f"{table_path}/indexes/rebuild-registry")
    build = await campaign.ask("mallory", "POST", f"{table_path}/indexes/i/builds")
    if build.status == 200:
        await campaign.ask("mallory", "GET", f"{table_path}/indexes/i/builds/{build.json['build-id']}/files")


def search_storage(campaign: AttackCampaign, location: str) -> None:
    """Search a file that the server wrote into the attacker's table, and report secrets in it."""
    leaks = campaign.world.secrets.find_leaks(campaign.world.read(location))
    if leaks:
        campaign.steps.append(f"reads {location}")
        campaign.report(f"a file of the attacker's table contains {', '.join(map(str, leaks))}")


async def create_own_table(campaign: AttackCampaign, prefix: str) -> tuple[str, str]:
    """Create a table of the attacker with a new name that begins with `prefix`. Return (name, location)."""
    name = campaign.create_name(prefix)
    table = await create_table(campaign, name)
    assert table.status == 200, table.raw
    return name, table.json["metadata"]["location"]


async def commit_foreign_manifest_list(campaign: AttackCampaign) -> None:
    name, _ = await create_own_table(campaign, "foreign_list")
    await commit_snapshot(
        campaign, name, campaign.choose_hint("manifest list", f"{campaign.world.warehouse}/no/snap.avro")
    )
    await read_table_in_all_ways(campaign, name)


async def commit_foreign_manifest(campaign: AttackCampaign) -> None:
    name, location = await create_own_table(campaign, "foreign_manifest")
    foreign_location = campaign.choose_hint("manifest", f"{campaign.world.warehouse}/no/m0.avro")
    try:
        size = len(campaign.world.read(foreign_location))
    except Exception:  # noqa: BLE001  The file does not exist, and each storage has its own error.
        size = MISSING_FILE_BYTES
    await commit_snapshot(
        campaign,
        name,
        write_manifest_list(campaign, f"{location}/metadata/snap.avro", [build_list_entry(foreign_location, size)]),
    )
    await read_table_in_all_ways(campaign, name)


async def commit_foreign_data_file(campaign: AttackCampaign) -> None:
    """Commit a data file of the victim, which the server reads when a join uses the table as a dimension."""
    name, location = await create_own_table(campaign, "foreign_data")
    foreign_location = campaign.choose_hint("data file", f"{campaign.world.warehouse}/no/0.parquet")
    try:
        size = len(campaign.world.read(foreign_location))
    except Exception:  # noqa: BLE001  The file does not exist.
        size = MISSING_FILE_BYTES
    manifest = write_manifest(
        campaign, f"{location}/metadata/m0.avro", [build_data_file(foreign_location, 1, 10**18, size)]
    )
    snapshot = await commit_snapshot(
        campaign, name, write_manifest_list(campaign, f"{location}/metadata/snap.avro", [manifest])
    )
    await read_table_in_all_ways(campaign, name)
    fact_name, fact_location = await create_own_table(campaign, "fact")
    manifest = write_manifest(
        campaign,
        f"{fact_location}/metadata/m0.avro",
        [write_own_parquet(campaign, f"{fact_location}/data/0.parquet", [1, 2, 3])],
    )
    await commit_snapshot(
        campaign, fact_name, write_manifest_list(campaign, f"{fact_location}/metadata/snap.avro", [manifest])
    )
    join = {"table": [EVIL, name], "on": {"id": campaign.rng.choice(("id", "amount"))}, "predicate": "id > 0"}
    for path in ("plan-tables", "explain"):
        body = {"joins": [join], **({"where": "id > 0"} if path == "explain" else {"predicate": "id > 0"})}
        answer = await campaign.ask("mallory", "POST", f"{ATTACKER_TABLES}/{fact_name}/{path}", body)
        joins = answer.json.get("joins", []) if answer.status == 200 else []
        if (
            snapshot.status < 300
            and campaign.world.is_victims(foreign_location)
            and any(item.get("keys") for item in joins)
        ):
            campaign.report("a join evaluated rows of the victim's data file")


async def commit_foreign_delete_files(campaign: AttackCampaign) -> None:
    """Commit a data file of the attacker with the victim's files as delete files.

    The attacker knows the victim's files from hints: names, ids and locations that the campaign has given to it.
    """
    name, location = await create_own_table(campaign, "foreign_deletes")
    data = write_own_parquet(campaign, f"{location}/data/0.parquet", [1, 2, 3])
    foreign_location = campaign.choose_hint("data file", f"{campaign.world.warehouse}/no/0.parquet")
    delete = build_data_file(foreign_location, low=1, high=10**18)  # The bounds contain the ids of all rows.
    position_deletes, equality_deletes = 1, 2
    delete.content = campaign.rng.choice((position_deletes, equality_deletes))
    delete.equality_ids = [1] if delete.content == equality_deletes else None
    delete.referenced_path = (
        campaign.choose_hint("data file", data.path)
        if delete.content == position_deletes and campaign.rng.random() < 0.5
        else None
    )
    manifests = [
        write_manifest(campaign, f"{location}/metadata/m0.avro", [data]),
        write_manifest(campaign, f"{location}/metadata/m1.avro", [delete], content=1),
    ]
    await commit_snapshot(campaign, name, write_manifest_list(campaign, f"{location}/metadata/snap.avro", manifests))
    await read_table_in_all_ways(campaign, name)


async def commit_natively(campaign: AttackCampaign) -> None:
    """Commit a change through Seamark's own route, where the server writes the manifests.

    The change adds or removes a file of the victim, although a change may name only files in the table's folder.
    """
    name, location = await create_own_table(campaign, "native")
    content = campaign.rng.choice(("data", "data", "position-deletes", "equality-deletes"))
    file = {
        "spec-id": 0,
        "content": content,
        "file-path": campaign.choose_hint(
            campaign.rng.choice(("data file", "manifest", "metadata file")), f"{location}/data/x.parquet"
        ),
        "file-format": "parquet",
        "partition": [],
        "file-size-in-bytes": 2000,
        "record-count": 3,
        **({"equality-ids": [1]} if content == "equality-deletes" else {}),
    }
    body: dict[str, Any] = {"add": [file], "read-snapshot-id": None}
    if campaign.rng.random() < 0.4:
        body = {"remove": [{"file-path": file["file-path"]}], "read-snapshot-id": None}
    if campaign.rng.random() < 0.3:
        body["index-files"] = [{"location": campaign.choose_hint("data file", f"{location}/x"), "size-in-bytes": 2000}]
    await campaign.ask("mallory", "POST", f"{ATTACKER_TABLES}/{name}/commit", body)
    await read_table_in_all_ways(campaign, name)


async def commit_foreign_statistics(campaign: AttackCampaign) -> None:
    """Commit statistics of the attacker's table whose path is a file of the victim, read the table, and purge it.

    A purge deletes the files that a table names.
    """
    name, location = await create_own_table(campaign, "statistics")
    manifest = write_manifest(
        campaign, f"{location}/metadata/m0.avro", [write_own_parquet(campaign, f"{location}/data/0.parquet", [1, 2])]
    )
    await commit_snapshot(campaign, name, write_manifest_list(campaign, f"{location}/metadata/snap.avro", [manifest]))
    foreign_location = campaign.choose_hint(
        campaign.rng.choice(("data file", "manifest", "metadata file")), f"{location}/x.puffin"
    )
    property_name = campaign.rng.choice(("statistics", "partition-statistics"))
    statistics_update: dict[str, Any] = {
        "snapshot-id": 7,
        "statistics-path": foreign_location,
        "file-size-in-bytes": 1000,
    }
    if property_name == "statistics":
        statistics_update |= {"file-footer-size-in-bytes": 100, "blob-metadata": []}
    update = {"action": f"set-{property_name}", property_name: statistics_update}
    await campaign.ask("mallory", "POST", f"{NAMES}/tables/{name}", {"requirements": [], "updates": [update]})
    await read_table_in_all_ways(campaign, name)
    await campaign.ask("mallory", "DELETE", f"{NAMES}/tables/{name}?purgeRequested=true")
    await purge_dropped_tables(campaign)


async def claim_foreign_location(campaign: AttackCampaign) -> None:
    """Place a table or view over the victim's location in any way. A purge would delete the victim's files."""
    claimed_location = campaign.choose_hint(
        campaign.rng.choice(("location", "moved location")), f"{campaign.world.warehouse}/no"
    )
    spellings = (
        claimed_location,
        claimed_location + "/",
        claimed_location.rpartition("/")[0],
        f"{claimed_location}/data",
        claimed_location.replace("file://", "file:"),
    )
    claimed_location = campaign.rng.choice(spellings)
    name, attack_number = campaign.create_name("over"), campaign.rng.randrange(6)
    if attack_number < 2:
        table = await create_table(campaign, name, **{"location": claimed_location, "stage-create": attack_number == 1})
        if attack_number == 1 and table.status == 200:
            token = next((item for item in table.json.get("config", {}).values() if "stage=" in item), "")
            await sign_everything(campaign, name, f"?stage={token.partition('stage=')[2]}" if token else "")
    elif attack_number == 2:
        name, _ = await create_own_table(campaign, "base")
        update = {"action": "set-location", "location": claimed_location}
        await campaign.ask("mallory", "POST", f"{NAMES}/tables/{name}", {"requirements": [], "updates": [update]})
    elif attack_number == 3:
        key = f"write.{campaign.rng.choice(('data', 'metadata', 'object-storage', 'folder-storage'))}.path"
        await create_table(campaign, name, properties={key: claimed_location})
    elif attack_number == 4:
        body = {
            "name": name,
            "schema": SCHEMA,
            "view-version": VIEW_VERSION,
            "location": claimed_location,
            "properties": {},
        }
        await campaign.ask("mallory", "POST", f"{NAMES}/views", body)
    else:
        await campaign.ask(
            "mallory",
            "POST",
            "/v1/namespaces",
            {"namespace": [EVIL, name], "properties": {"location": claimed_location}},
        )
        await campaign.ask(
            "mallory", "POST", f"/v1/namespaces/{EVIL}%1F{name}/tables", {"name": "inner", "schema": SCHEMA}
        )
    await check_location_overlap(campaign, name)
    await sign_everything(campaign, name)
    await read_table_in_all_ways(campaign, name)
    await campaign.ask("mallory", "DELETE", f"{NAMES}/tables/{name}?purgeRequested=true")
    await purge_dropped_tables(campaign)


async def check_location_overlap(campaign: AttackCampaign, name: str) -> None:
    """Report a finding if the location of the attacker's table `name` overlaps that of a table of the victim."""
    answer = await campaign.ask("mallory", "GET", f"{NAMES}/tables/{name}")
    if answer.status != 200:
        return
    own_prefix = answer.json["metadata"]["location"].rstrip("/") + "/"
    for foreign_location in campaign.world.hints["location"]:
        foreign_prefix = foreign_location.rstrip("/") + "/"
        if own_prefix.startswith(foreign_prefix) or foreign_prefix.startswith(own_prefix):
            campaign.report(f"the attacker's table at {own_prefix} overlaps the victim's table at {foreign_prefix}")


async def purge_dropped_tables(campaign: AttackCampaign) -> None:
    """Purge the dropped tables whose names begin with a prefix that the attacks of this module use.

    The request is from morgan, the admin of the attacker's namespace, who does not have to wait for the retention.
    """
    dropped_answer = await campaign.ask("morgan", "GET", f"/api/v1/dropped?namespace={EVIL}")
    for item in dropped_answer.json.get("dropped", []) if dropped_answer.status == 200 else []:
        if item["name"].startswith(PURGED_PREFIXES):
            await campaign.ask("morgan", "DELETE", f"/api/v1/dropped/{item['id']}")


async def use_foreign_ids(campaign: AttackCampaign) -> None:
    """Use ids of the victim with the attacker's rights: of dropped tables, builds, plans, pages and former requests."""
    for principal in ("mallory", "morgan", "riley"):
        dropped_hint = campaign.choose_hint("dropped")
        target = {"namespace": [EVIL], "name": campaign.create_name("undropped")}
        await campaign.ask(principal, "POST", f"/api/v1/dropped/{dropped_hint}/undrop", target)
        await campaign.ask(principal, "DELETE", f"/api/v1/dropped/{dropped_hint}")
    name, _ = await create_own_table(campaign, "ids")
    table_path = f"{ATTACKER_TABLES}/{name}"
    await campaign.ask("mallory", "PUT", f"{table_path}/indexes/i", {"kind": "bloom", "columns": ["id"]})
    build = campaign.choose_hint("build")
    for method, path, body in (
        ("GET", "", None),
        ("GET", "/files", None),
        ("POST", "/finish", {}),
        (
            "POST",
            "/index-files",
            {"index-files": [{"location": campaign.choose_hint("data file"), "size-in-bytes": 1000}]},
        ),
    ):
        await campaign.ask("mallory", method, f"{table_path}/indexes/i/builds/{build}{path}", body)
    await campaign.ask(
        "mallory", "POST", f"{NAMES}/tables/{name}/tasks", {"plan-task": campaign.choose_hint("plan task")}
    )
    await campaign.ask(
        "mallory", "GET", f"{NAMES}/tables/{name}/plan/{quote(campaign.choose_hint('plan task'), safe='')}"
    )
    for route in ("files", "stats/id", "partitions"):
        await campaign.ask(
            "mallory", "GET", f"{table_path}/{route}?page-token={quote(campaign.choose_hint('page token'), safe='')}"
        )
    key, body = campaign.choose_hint("idempotency key"), json.loads(campaign.choose_hint("idempotent body", "{}"))
    await campaign.ask("mallory", "POST", f"{NAMES}/tables/{name}", body, {"Idempotency-Key": key})
    victim_path = (
        f"/v1/namespaces/{quote(campaign.choose_hint('namespace'))}/tables/{quote(campaign.choose_hint('table'))}"
    )
    await campaign.ask("mallory", "POST", victim_path, body, {"Idempotency-Key": key})


async def use_moved_name(campaign: AttackCampaign) -> None:
    """Use the name and the location that a table had before it was moved into the victim's namespace."""
    for principal in ("mallory", "riley"):
        await campaign.ask(principal, "GET", f"{ATTACKER_TABLES}/moved/timeline")
        await campaign.ask(principal, "GET", f"{ATTACKER_TABLES}/moved/timeline?order=desc")
        await campaign.ask(principal, "GET", f"{ATTACKER_TABLES}/moved/files")
    name = campaign.rng.choice(("moved", campaign.create_name("recreated")))
    former_location = campaign.choose_hint("moved location", f"{campaign.world.warehouse}/no")
    await create_table(campaign, name, location=former_location + campaign.rng.choice(("", "/", "/data", "/metadata")))
    await check_location_overlap(campaign, name)
    await sign_everything(campaign, name)
    uuid_update = {"action": "assign-uuid", "uuid": campaign.choose_hint("moved uuid", "0")}
    await campaign.ask("mallory", "POST", f"{NAMES}/tables/{name}", {"requirements": [], "updates": [uuid_update]})
    await read_table_in_all_ways(campaign, name)
    await campaign.ask("mallory", "DELETE", f"{NAMES}/tables/{name}?purgeRequested=true")
    await purge_dropped_tables(campaign)


async def check_properties_that_steal_tokens(campaign: AttackCampaign) -> None:
    """Check that a victim who reads the attacker's table contacts only this server.

    The victim's client must load no code but its own.
    """
    name, key = campaign.create_name("steal"), campaign.rng.choice(STEALING_METADATA)
    value = campaign.rng.choice((CANARY, f"{CANARY}/x", "canary.evil.Code"))
    if campaign.rng.random() < 0.5:
        await create_table(campaign, name, properties={key: value})
    else:
        await create_table(campaign, name)
        update = {"action": "set-properties", "updates": {key: value}}
        await campaign.ask("mallory", "POST", f"{NAMES}/tables/{name}", {"requirements": [], "updates": [update]})
    answer = await campaign.world.ask("rita", "GET", f"{NAMES}/tables/{name}")
    if answer.status == 200:
        # As in PyIceberg, the `config` of the table overrides its properties.
        properties = {**answer.json["metadata"]["properties"], **answer.json.get("config", {})}
        if properties.get(key) == value:
            campaign.report(f"the attacker's table sends {key} = {value} to a reader's client")


async def create_view_with_foreign_owner(campaign: AttackCampaign) -> None:
    """Create a view that would run with another user's rights."""
    name = campaign.create_name("owned")
    key = campaign.rng.choice(("trino.run-as-owner", "trino.run-as-owner", "Trino.Run-As-Owner"))
    view = {"name": name, "schema": SCHEMA, "view-version": {**VIEW_VERSION, "default-namespace": [EVIL]}}
    properties = {key: "root"} if campaign.rng.random() < 0.5 else {}
    await campaign.ask("mallory", "POST", f"{NAMES}/views", {**view, "properties": properties})
    if not properties:
        update = {"action": "set-properties", "updates": {key: "root"}}
        await campaign.ask("mallory", "POST", f"{NAMES}/views/{name}", {"updates": [update], "requirements": []})
    answer = await campaign.ask("mallory", "GET", f"{NAMES}/views/{name}")
    if answer.status == 200 and "root" in answer.json["metadata"]["properties"].values():
        campaign.report("a view of the attacker runs with the rights of root")


async def sign_requests_of_own_table(campaign: AttackCampaign) -> None:
    name, _ = await create_own_table(campaign, "signs")
    await sign_everything(campaign, name)


async def undrop_elsewhere(campaign: AttackCampaign) -> None:
    """Undrop a table of the attacker under another name, possibly in a namespace of the victim."""
    name, _ = await create_own_table(campaign, "back")
    await campaign.ask("mallory", "DELETE", f"{NAMES}/tables/{name}")
    dropped_answer = await campaign.ask("mallory", "GET", f"/api/v1/dropped?namespace={EVIL}")
    dropped_tables = dropped_answer.json["dropped"] if dropped_answer.status == 200 else []
    if dropped_tables:
        target = {"namespace": [campaign.choose_hint("namespace")], "name": campaign.create_name("planted")}
        await campaign.ask("mallory", "POST", f"/api/v1/dropped/{dropped_tables[-1]['id']}/undrop", target)


async def overwrite_manifests(campaign: AttackCampaign) -> None:
    """Commit the attacker's own manifests, and then overwrite them, so that they name files of the victim.

    The server has checked the manifests at the commit, and reads them again later.
    """
    name, location = await create_own_table(campaign, "swapped")
    manifest = write_manifest(
        campaign, f"{location}/metadata/m0.avro", [write_own_parquet(campaign, f"{location}/data/0.parquet", [1, 2])]
    )
    list_location = write_manifest_list(campaign, f"{location}/metadata/snap.avro", [manifest])
    await commit_snapshot(campaign, name, list_location)
    foreign_location = campaign.choose_hint("data file", f"{campaign.world.warehouse}/no/0.parquet")
    if campaign.rng.random() < 0.5:
        write_manifest(campaign, manifest.path, [build_data_file(foreign_location, 1, 10**18)])
    else:
        write_manifest_list(
            campaign,
            list_location,
            [
                build_list_entry(
                    campaign.choose_hint("manifest", f"{campaign.world.warehouse}/no/m0.avro"), MISSING_FILE_BYTES
                )
            ],
        )
    await read_table_in_all_ways(campaign, name)
    await campaign.ask("mallory", "DELETE", f"{NAMES}/tables/{name}?purgeRequested=true")
    await purge_dropped_tables(campaign)


async def overwrite_metadata(campaign: AttackCampaign) -> None:
    """Overwrite the metadata file of a table of the attacker, so that it names the victim's location, UUID or files.

    The test empties the server's cache, so the server reads the forged file.
    """
    name, location = await create_own_table(campaign, "swapped_metadata")
    answer = await campaign.ask("mallory", "GET", f"{NAMES}/tables/{name}")
    metadata_location = answer.json["metadata-location"]
    forged_metadata = dict(answer.json["metadata"])
    foreign_location = campaign.choose_hint(
        campaign.rng.choice(("location", "moved location")), f"{campaign.world.warehouse}/no"
    )
    match campaign.rng.randrange(4):
        case 0:
            forged_metadata["location"] = foreign_location
        case 1:
            forged_metadata["table-uuid"] = campaign.choose_hint(
                "uuid", campaign.choose_hint("moved uuid", forged_metadata["table-uuid"])
            )
        case 2:
            forged_metadata["properties"] = {
                **forged_metadata.get("properties", {}),
                "write.data.path": foreign_location,
                "s3.signer.uri": CANARY,
            }
        case _:
            snapshot = {
                "snapshot-id": 7,
                "sequence-number": 1,
                "timestamp-ms": forged_metadata["last-updated-ms"],
                "manifest-list": campaign.choose_hint("manifest list", f"{location}/metadata/snap.avro"),
                "summary": {"operation": "append"},
                "schema-id": 0,
            }
            forged_metadata |= {"snapshots": [snapshot], "current-snapshot-id": 7, "last-sequence-number": 1}
            forged_metadata["refs"] = {"main": {"snapshot-id": 7, "type": "branch"}}
    campaign.world.write(metadata_location, json.dumps(forged_metadata).encode())
    campaign.world.server.components.catalog.documents.cache.clear()
    campaign.steps.append(f"writes over {metadata_location}: {json.dumps(forged_metadata)[:1500]}")
    await sign_everything(campaign, name)
    await read_table_in_all_ways(campaign, name)
    await campaign.ask("mallory", "DELETE", f"{NAMES}/tables/{name}?purgeRequested=true")
    await purge_dropped_tables(campaign)


async def overwrite_view(campaign: AttackCampaign) -> None:
    """Overwrite the metadata file of a view of the attacker.

    The forged file has another owner, UUID or location, or another SQL text with the same owner.
    """
    name = campaign.create_name("swapped_view")
    view = {"name": name, "schema": SCHEMA, "view-version": {**VIEW_VERSION, "default-namespace": [EVIL]}}
    await campaign.ask("mallory", "POST", f"{NAMES}/views", {**view, "properties": {"trino.run-as-owner": "mallory"}})
    answer = await campaign.ask("mallory", "GET", f"{NAMES}/views/{name}")
    if answer.status != 200:
        return
    forged_metadata = dict(answer.json["metadata"])
    match campaign.rng.randrange(4):
        case 0:
            forged_metadata["properties"] = {"trino.run-as-owner": "root"}
        case 1:
            forged_metadata["view-uuid"] = campaign.choose_hint(
                "uuid", campaign.choose_hint("moved uuid", forged_metadata["view-uuid"])
            )
        case 2:
            forged_metadata["location"] = campaign.choose_hint(
                campaign.rng.choice(("location", "moved location")), f"{campaign.world.warehouse}/no"
            )
        case _:
            text = [{"type": "sql", "sql": "SELECT 'other' AS id", "dialect": "trino"}]
            forged_metadata["versions"] = [
                {**version, "representations": text} for version in forged_metadata["versions"]
            ]
    campaign.world.write(answer.json["metadata-location"], json.dumps(forged_metadata).encode())
    campaign.world.server.components.catalog.documents.cache.clear()
    campaign.steps.append(f"writes over {answer.json['metadata-location']}: {json.dumps(forged_metadata)[:1500]}")
    second_answer = await campaign.ask("riley", "GET", f"{NAMES}/views/{name}")
    if second_answer.status == 200:
        metadata = second_answer.json["metadata"]
        if "root" in metadata["properties"].values():
            campaign.report("a view of the attacker runs with the rights of root")
        if metadata["properties"] and metadata["versions"] != answer.json["metadata"]["versions"]:
            campaign.report("a view runs with its owner's rights and a text that was never committed")
    update = {"action": "set-properties", "updates": {"x": "1"}}
    await campaign.ask("mallory", "POST", f"{NAMES}/views/{name}", {"updates": [update], "requirements": []})
    await campaign.ask("mallory", "DELETE", f"{NAMES}/views/{name}")


async def assign_victims_uuid(campaign: AttackCampaign) -> None:
    """Assign the victim's UUID to a table that an admin registered without a UUID."""
    name, location = await create_own_table(campaign, "nameless")
    answer = await campaign.ask("mallory", "GET", f"{NAMES}/tables/{name}")
    old_metadata = {**answer.json["metadata"], "format-version": 1, "location": f"{location}-old"}
    del old_metadata["table-uuid"]
    metadata_location = f"{location}-old/metadata/v1.metadata.json"
    campaign.world.write(metadata_location, json.dumps(old_metadata).encode())
    body = {"name": f"{name}_old", "metadata-location": metadata_location}
    await campaign.world.ask_successfully("root", "POST", f"{NAMES}/register", body)
    uuid_update = {
        "action": "assign-uuid",
        "uuid": campaign.choose_hint("uuid", campaign.choose_hint("moved uuid", "0")),
    }
    path = f"{NAMES}/tables/{name}_old"
    await campaign.ask("mallory", "POST", path, {"requirements": [], "updates": [uuid_update]})
    await commit_snapshot(
        campaign, f"{name}_old", campaign.choose_hint("manifest list", f"{campaign.world.warehouse}/no/snap.avro")
    )
    await read_table_in_all_ways(campaign, f"{name}_old")
    await campaign.ask("mallory", "DELETE", f"{path}?purgeRequested=true")
    await purge_dropped_tables(campaign)


CRAFTED_ATTACKS = (
    *(
        commit_foreign_manifest_list,
        commit_foreign_manifest,
        commit_foreign_data_file,
        commit_foreign_delete_files,
        commit_natively,
        commit_foreign_statistics,
    ),
    *(
        claim_foreign_location,
        use_foreign_ids,
        use_moved_name,
        check_properties_that_steal_tokens,
        create_view_with_foreign_owner,
        sign_requests_of_own_table,
        undrop_elsewhere,
    ),
    *(overwrite_manifests, overwrite_metadata, overwrite_view, assign_victims_uuid),
)
