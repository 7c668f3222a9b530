"""Two tenants on one server: the victim's namespace with secrets, and the attacker's namespace.

`open_world` starts a server with logins over a local warehouse or a real S3 store, and lets an ordinary client
(PyIceberg) write the victim's tables. The attacker owns the namespace `evil`. Everything about the victim's namespace
is secret, except the hints of a campaign.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.objects.local import LocalObjects
from seamark.metaserver.objects.s3 import S3Objects
from seamark.metaserver.server import serve_gateway
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.api.client import VIEW_VERSION, Answer, Api, build_function_document, create_key
from tests.attacks.oracle import Secrets
from tests.server.rig import RunningServer, run_server
from tests.services.process import choose_free_port
from tests.services.s3 import S3

EVIL = "evil"
NAMES = f"/v1/namespaces/{EVIL}"
FIELDS: list[dict[str, Any]] = [
    {"id": 1, "name": "id", "required": False, "type": "long"},
    {"id": 2, "name": "data", "required": False, "type": "string"},
    {"id": 3, "name": "part", "required": False, "type": "string"},
    {"id": 4, "name": "amount", "required": False, "type": "long"},
]
"""The fields of the attacker's tables. Their ids and types equal the victim's, so foreign bounds would be readable."""
SCHEMA = {"type": "struct", "schema-id": 0, "fields": FIELDS}
HOSTILE_PRINCIPALS = ("mallory", "morgan", "riley", "nobody", "")
"""A writer, an admin and a reader of only `evil`, a login without a grant, and a client without a login."""


@dataclass
class AttackWorld:
    """A server with the victim's tables, the tokens of all principals, and the secrets that must not leak."""

    server: RunningServer
    api: Api
    secrets: Secrets
    tokens: dict[str, str]
    warehouse: str
    s3: S3 | None
    bucket: str
    victim: str
    """The victim's namespace."""
    hints: dict[str, list[str]] = field(default_factory=dict)
    """Names, ids and locations that an attacker may know, by kind."""
    gateway: str = ""
    """URL of the objects gateway, or empty if there is none."""
    attacker_warehouse: str = ""
    """The warehouse to which the requests of hostile principals and for `evil` go, or empty for the victim's."""
    touched_locations: list[str] = field(default_factory=list)
    """Locations of all files that the server has created or deleted. A file may be gone before `files` is called."""

    async def ask(self, principal: str, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        headers = dict(options.pop("headers", {}))
        if principal:
            headers.setdefault("Authorization", f"Bearer {self.tokens[principal]}")
        if self.attacker_warehouse and (principal in HOSTILE_PRINCIPALS or path.startswith(NAMES)):
            path = f"/warehouses/{self.attacker_warehouse}{path}"
        return await self.api(method, path, body, headers=headers, **options)

    async def ask_successfully(self, principal: str, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """Send a request that must succeed, and return its JSON."""
        answer = await self.ask(principal, method, path, body, **options)
        assert answer.status < 300, (method, path, answer.raw)
        return answer.json if answer.raw else None

    # Storage

    def read(self, location: str) -> bytes:
        if self.s3 is None:
            return Path(location.removeprefix("file://")).read_bytes()
        return bytes(self._call_s3("get_object", location)["Body"].read())

    def write(self, location: str, data: bytes) -> None:
        """Write an object to the storage, as an engine does for its own table."""
        if self.s3 is None:
            path = Path(location.removeprefix("file://"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        else:
            self._call_s3("put_object", location, Body=data)

    def _call_s3(self, operation: str, location: str, **options: Any) -> Any:
        assert self.s3 is not None
        bucket, _, key = location.removeprefix("s3://").partition("/")
        client = self.s3.client()  # put_object replaces an existing object.
        try:
            return getattr(client, operation)(Bucket=bucket, Key=key, **options)
        finally:
            client.close()

    def read_files(self) -> dict[str, bytes]:
        """Return all objects of the warehouse, by location."""
        if self.s3 is None:
            root = Path(self.warehouse.removeprefix("file://"))
            return {f"file://{path}": path.read_bytes() for path in root.rglob("*") if path.is_file()}
        client = self.s3.client()
        try:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
            keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
            return {
                f"s3://{self.bucket}/{key}": client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
                for key in keys
            }
        finally:
            client.close()

    # The victim's objects

    def is_victims(self, location: str) -> bool:
        return any(location.startswith(root + "/") for root in self.hints["location"])

    def list_touched_of_victim(self) -> list[str]:
        return [location for location in self.touched_locations if self.is_victims(location)]

    async def compute_fingerprint(self) -> dict[str, str]:
        """Return digests of the victim's files, and of the answers to an admin about the victim's namespace.

        Another digest covers all grants outside the attacker's namespace.
        """
        digests = {
            location: _compute_digest(data) for location, data in self.read_files().items() if self.is_victims(location)
        }
        namespace_path = f"/v1/namespaces/{self.victim}"
        paths = [namespace_path, f"{namespace_path}/tables", f"{namespace_path}/views", f"{namespace_path}/functions"]
        paths += [f"{namespace_path}/views/{name}" for name in self.hints["view"]]
        paths += [f"{namespace_path}/functions/{name}" for name in self.hints["function"]]
        paths += [f"/api/v1/dropped?namespace={self.victim}"]
        for path in paths:
            digests[path] = _compute_digest((await self.ask("root", "GET", path)).raw)
        for table in self.hints["table"]:
            loaded_table = await self.ask_successfully("root", "GET", f"{namespace_path}/tables/{table}")
            # `config` is left out, because its credentials change over time.
            lasting_parts = [loaded_table["metadata-location"], loaded_table["metadata"]]
            digests[f"{namespace_path}/tables/{table}"] = _compute_digest(json.dumps(lasting_parts).encode())
            answer = await self.ask_successfully("root", "GET", f"/api/v1/tables/{self.victim}/{table}/indexes")
            # The uses of an index change over time.
            indexes = [{**index, "used": None} for index in answer["indexes"]]
            digests[f"indexes of {table}"] = _compute_digest(json.dumps(indexes).encode())
        grants = (await self.ask_successfully("root", "GET", "/api/v1/grants"))["grants"]
        # The admin of the attacker's namespace can change grants on it.
        grants = [grant for grant in grants if grant["namespace"][:1] != [EVIL]]
        digests["grants"] = _compute_digest(json.dumps(grants).encode())
        return digests


def _compute_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def _record_locations(store: type[LocalObjects] | type[S3Objects], touched_locations: list[str]) -> Iterator[None]:
    """Record the location of each file that the server creates or deletes through this kind of store."""
    create, delete = store.create, store.delete

    async def record_create(self: Any, location: str, data: bytes, **options: bool) -> None:
        touched_locations.append(location)
        await create(self, location, data, **options)

    async def record_delete(self: Any, location: str) -> None:
        touched_locations.append(location)
        await delete(self, location)

    with patch.object(store, "create", record_create), patch.object(store, "delete", record_delete):
        yield


@asynccontextmanager
async def open_world(
    home: Path, rng: random.Random, s3: S3 | None = None, *, with_gateway: bool = False, attacker_warehouse: str = ""
) -> AsyncIterator[AttackWorld]:
    """Open a server with both tenants. When it is closed, nothing keeps running.

    Args:
        with_gateway: Also open the objects gateway, over S3.
        attacker_warehouse: The name of a second warehouse, in which the attackers have their roles for everything.
            Their requests go to this warehouse. If it is empty, they go to the warehouse of the victim.
    """
    secrets = Secrets()
    suffix = f"{rng.getrandbits(40):010x}"
    victim, viola = secrets.register("namespace", f"vault{suffix}"), secrets.register("principal", f"viola-{suffix}")
    grants = (
        Grant("root", "admin"),
        Grant(viola, "writer", (victim,)),
        Grant("rita", "reader", (victim,)),
        Grant("rita", "reader", (EVIL,)),
        Grant("bridge", "writer", (victim,)),
        Grant("bridge", "writer", (EVIL,)),
        Grant("mallory", "writer", (EVIL,)),
        Grant("morgan", "admin", (EVIL,)),
        Grant("riley", "reader", (EVIL,)),
    )
    tokens: dict[str, str] = {}
    clock = SystemClock()
    home.mkdir(parents=True, exist_ok=True)
    async with open_store(f"sqlite:///{home}/seamark.db", clock=clock, queue_limit=10) as store:
        for name in (*dict.fromkeys(grant.principal for grant in grants), "nobody"):
            own_grants = [grant for grant in grants if grant.principal == name]
            tokens["viola" if name == viola else name] = await create_token(store, clock, name, None, own_grants)
    bucket = s3.create_bucket() if s3 else ""
    warehouse = f"s3://{bucket}/lake" if s3 else f"file://{home}/lake"
    settings: dict[str, Any] = {"auth": "token", "warehouse": warehouse, "plan_inline_limit": 1, "plan_page_size": 1}
    settings["log_level"] = "error"
    if attacker_warehouse:
        settings["warehouse_roots"] = (f"file://{home}-warehouses",)
    if s3:
        settings |= {
            "s3_endpoint": s3.endpoint,
            "s3_region": s3.region,
            "s3_access_key_id": s3.access_key,
            "s3_secret_access_key": s3.secret_key,
            "s3_client_access": "signing",
        }
    touched_locations: list[str] = []
    if with_gateway:
        settings |= {"s3_client_access": "gateway", "gateway_port": choose_free_port()}
    with _record_locations(S3Objects if s3 else LocalObjects, touched_locations):
        async with run_server(home, **settings) as server, AsyncExitStack() as stack:
            world = AttackWorld(
                server, Api(server), secrets, tokens, warehouse, s3, bucket, victim, touched_locations=touched_locations
            )
            if with_gateway:
                await stack.enter_async_context(serve_gateway(server.components))
                world.gateway = f"http://127.0.0.1:{settings['gateway_port']}"
            await _create_tenants(world, suffix, rng)
            if attacker_warehouse:
                await _create_attacker_warehouse(world, home, attacker_warehouse)
            yield world


async def _create_tenants(world: AttackWorld, suffix: str, rng: random.Random) -> None:
    for principal in ("viola", "rita", "root", "bridge"):
        world.secrets.register(f"token of {principal}", world.tokens[principal], value=True)
    for namespace in (EVIL, world.victim):
        await world.ask_successfully("root", "POST", "/v1/namespaces", {"namespace": [namespace]})
    await _VictimData(world, suffix, rng).create()


async def _create_attacker_warehouse(world: AttackWorld, home: Path, name: str) -> None:
    body = {"name": name, "location": f"file://{home}-warehouses/{name}"}
    await world.ask_successfully("root", "POST", "/api/v1/warehouses", body)
    root = f"/warehouses/{name}"
    await world.ask_successfully("root", "POST", f"{root}/v1/namespaces", {"namespace": [EVIL]})
    for principal, role in (("mallory", "writer"), ("morgan", "admin"), ("riley", "reader")):
        grant = {"principal": principal, "role": role}
        await world.ask_successfully("root", "PUT", f"{root}/api/v1/grants", grant)
    world.attacker_warehouse = name


def _build_arrow_schema(names: Sequence[str]) -> pa.Schema:
    types = (pa.int64(), pa.string(), pa.string(), pa.int64())
    return pa.schema(list(zip(names, types, strict=True)))


class _VictimData:
    """The steps that fill the victim's namespace."""

    def __init__(self, world: AttackWorld, suffix: str, rng: random.Random) -> None:
        self.world, self.suffix, self.rng = world, suffix, rng
        self.hints: dict[str, list[str]] = {name: [] for name in HINT_KINDS}
        world.hints = self.hints

    def add_secret(self, label: str, *, may_be_hint: bool = False) -> str:
        """Register a new random text as a secret, and return it.

        Args:
            label: What the secret is, for reports of leaks.
            may_be_hint: Whether the test may give the secret to an attacker as a hint.
        """
        return self.world.secrets.register(
            label, f"{label.replace(' ', '')}{self.rng.getrandbits(48):012x}", value=not may_be_hint
        )

    def add_hint(self, kind: str, text: str | int) -> str:
        """Register a name, id or location as a possible hint, and return it.

        A text of at least 10 characters is also a secret. A shorter text could occur in an answer by chance.
        """
        text = str(text)
        if len(text) >= 10:
            self.world.secrets.register(kind, text)
        self.hints[kind].append(text)
        return text

    async def create(self) -> None:
        world = self.world
        names = f"/v1/namespaces/{world.victim}"
        self.add_hint("namespace", world.victim)
        properties = {self.add_secret("property key"): self.add_secret("property of namespace")}
        await world.ask_successfully("viola", "POST", f"{names}/properties", {"removals": [], "updates": properties})
        await self._create_moved_table()
        await asyncio.to_thread(self._create_written_tables)
        for name in [*self.hints["table"], *self.hints["dropped name"]]:
            await self._register_identifiers(name)
        await self._create_other_objects(self.hints["table"][0])
        await self._create_dropped_table()
        await self._create_view_function_and_token()

    async def _create_moved_table(self) -> None:
        """Create a table as the attacker, and move it into the victim's namespace as a user with rights on both."""
        world = self.world
        answer = await world.ask_successfully(
            "mallory", "POST", f"/v1/namespaces/{EVIL}/tables", {"name": "moved", "schema": SCHEMA}
        )
        self.hints["moved location"].append(answer["metadata"]["location"])
        self.hints["moved uuid"].append(answer["metadata"]["table-uuid"])
        name = self.add_hint("table", f"shipment{self.suffix}")
        identifiers = {
            "source": {"namespace": [EVIL], "name": "moved"},
            "destination": {"namespace": [world.victim], "name": name},
        }
        await world.ask_successfully("bridge", "POST", "/v1/tables/rename", identifiers)

    def _create_written_tables(self) -> None:
        """Write tables with PyIceberg, as an ordinary client."""
        world, add_secret = self.world, self.add_secret
        options: dict[str, str] = {"uri": world.server.url, "token": world.tokens["viola"]}
        if world.s3 is not None:
            options |= world.s3.build_client_properties() | {"s3.signer": "", "s3.remote-signing-enabled": "false"}
        catalog = RestCatalog("victim", **options)
        # Paths contain this value, and an attacker may know paths.
        part = add_secret("partition value", may_be_hint=True)
        # Column 2 partitions the table, so paths contain its name too.
        columns = [add_secret("column name", may_be_hint=number == 2) for number in range(4)]
        schema = _build_arrow_schema(columns)
        for kind, name in (("table", f"ledger{self.suffix}"), ("dropped name", f"gone{self.suffix}")):
            properties = {add_secret("property key"): add_secret("property value")}
            table = catalog.create_table((world.victim, self.add_hint(kind, name)), schema, properties=properties)
            with table.update_spec() as change:
                change.add_identity(columns[2])
            for _ in range(2):
                table.append(self._build_secret_rows(schema, part), snapshot_properties={"note": add_secret("summary")})
            snapshot = table.current_snapshot()
            assert snapshot is not None
            table.manage_snapshots().create_tag(snapshot.snapshot_id, add_secret("tag name")).commit()
        # `_create_moved_table` has created and moved the first table.
        moved_table = catalog.load_table((world.victim, self.hints["table"][0]))
        moved_table.append(self._build_secret_rows(_build_arrow_schema([item["name"] for item in FIELDS]), part))
        # The table that this method has written becomes the first one, which attacks prefer.
        self.hints["table"].reverse()

    def _build_secret_rows(self, schema: pa.Schema, part: str) -> pa.Table:
        """Return three rows with new values, and register these values as secrets.

        The values are complete in bounds: strings below 16 characters are not truncated.
        """
        count = 3
        numbers = [self.rng.randrange(10**15, 10**18) for _ in range(2 * count)]
        register = self.world.secrets.register
        texts = [register("row text", f"row{self.rng.getrandbits(44):011x}", value=True) for _ in range(count)]
        for number in numbers:
            register("row number", number, value=True)
        return pa.table([numbers[:count], texts, [part] * count, numbers[count:]], schema=schema)

    async def _register_identifiers(self, name: str) -> None:
        """Register the identifiers and file locations of the victim's table `name` as secrets and possible hints."""
        world = self.world
        answer = await world.ask_successfully("root", "GET", f"/v1/namespaces/{world.victim}/tables/{name}")
        metadata = answer["metadata"]
        self.add_hint("uuid", metadata["table-uuid"])
        self.add_hint("location", metadata["location"])
        self.add_hint("metadata file", answer["metadata-location"])
        for snapshot in metadata["snapshots"]:
            self.add_hint("snapshot", snapshot["snapshot-id"])
            self.add_hint("manifest list", snapshot["manifest-list"])
        files = await world.ask_successfully("root", "GET", f"/api/v1/tables/{world.victim}/{name}/files")
        for file in files["files"]:
            self.add_hint("data file", file["file-path"])
        for location in world.read_files():
            if location.startswith(metadata["location"]) and location.endswith("-m0.avro"):
                self.add_hint("manifest", location)

    async def _create_other_objects(self, name: str) -> None:
        """Create an index with a build, stored plans, result pages, a staged table and a report for a table.

        Register the names and ids of these objects as possible hints, which are texts that an attacker may know.
        """
        world = self.world
        table_api = f"/api/v1/tables/{world.victim}/{name}"
        table_path = f"/v1/namespaces/{world.victim}/tables/{name}"
        loaded_table = await world.ask_successfully("root", "GET", table_path)
        columns = [field["name"] for field in loaded_table["metadata"]["schemas"][-1]["fields"]]
        index = self.add_hint("index", f"byowner{self.suffix}")
        await world.ask_successfully(
            "viola", "PUT", f"{table_api}/indexes/{index}", {"kind": "bloom", "columns": [columns[1]]}
        )
        build = await world.ask_successfully("viola", "POST", f"{table_api}/indexes/{index}/builds")
        self.add_hint("build", build["build-id"])
        plan = await world.ask_successfully(
            "rita", "POST", f"{table_api}/plan-tables", {"predicate": f'"{columns[0]}" > 1'}
        )
        self.add_hint("plan table", plan["name"])
        headers = {"X-Seamark-Plans": self.add_hint("audience", f"audience{self.suffix}")}
        plan_request = {"predicate": f'"{columns[0]}" > 2', "lease-s": 600}
        answer = await world.ask_successfully("rita", "POST", f"{table_api}/plan-tables", plan_request, headers=headers)
        self.add_hint("plan snapshot", answer["plan-snapshot-id"])
        scan = await world.ask_successfully("rita", "POST", f"{table_path}/plan", {})
        for token in scan.get("plan-tasks", ()):
            self.add_hint("plan task", token)
        page = await world.ask_successfully("rita", "GET", f"{table_api}/files?limit=1")
        self.add_hint("page token", page["next-page-token"])
        page = await world.ask_successfully("rita", "GET", f"{table_api}/stats/{columns[0]}?limit=1")
        self.add_hint("page token", page["next-page-token"])
        key = create_key()
        staged_table = {"name": f"staged{self.suffix}", "schema": SCHEMA, "stage-create": True}
        creation = await world.ask_successfully("viola", "POST", f"/v1/namespaces/{world.victim}/tables", staged_table)
        for text in creation.get("config", {}).values():
            if "stage=" in text:
                self.add_hint("stage", text.partition("stage=")[2])
        update = {"action": "set-properties", "updates": {"note": self.add_secret("property")}}
        body = {"requirements": [], "updates": [update]}
        await world.ask_successfully("viola", "POST", table_path, body, key=key)
        self.add_hint("idempotency key", key)
        self.hints["idempotent body"].append(json.dumps(body))
        report = {
            "report-type": "scan-report",
            "table-name": name,
            "snapshot-id": loaded_table["metadata"]["current-snapshot-id"],
            "filter": {"type": "eq", "term": columns[1], "value": self.add_secret("value in a report")},
            "schema-id": 0,
            "projected-field-ids": [1],
            "projected-field-names": [columns[0]],
            "metrics": {},
        }
        await world.ask_successfully("rita", "POST", f"{table_path}/metrics", report)
        self.add_hint("metadata file", (await world.ask_successfully("root", "GET", table_path))["metadata-location"])

    async def _create_dropped_table(self) -> None:
        world, name = self.world, self.hints["dropped name"][0]
        await world.ask_successfully("viola", "DELETE", f"/v1/namespaces/{world.victim}/tables/{name}")
        answer = await world.ask_successfully("viola", "GET", f"/api/v1/dropped?namespace={world.victim}")
        self.add_hint("dropped", answer["dropped"][0]["id"])

    async def _create_view_function_and_token(self) -> None:
        """Create a view, a function and an access token, and register names as hints and texts as secrets."""
        world = self.world
        names = f"/v1/namespaces/{world.victim}"
        sql = f"SELECT 1 AS id, '{self.add_secret('text of a view')}' AS data"
        version = {**VIEW_VERSION, "representations": [{"type": "sql", "sql": sql, "dialect": "trino"}]}
        version["default-namespace"] = [world.victim]
        view = {"name": self.add_hint("view", f"report{self.suffix}"), "schema": SCHEMA, "view-version": version}
        view["properties"] = {"comment": self.add_secret("comment")}
        answer = await world.ask_successfully("viola", "POST", f"{names}/views", view)
        self.add_hint("view file", answer["metadata-location"])
        self.add_hint("location", answer["metadata"]["location"])
        document = build_function_document()
        version = document["definitions"][0]["versions"][0]
        version["representations"][0]["sql"] = f"x + '{self.add_secret('body of a function')}'"
        name = self.add_hint("function", f"score{self.suffix}")
        await world.ask_successfully("viola", "PUT", f"/api/v1/functions/{world.victim}/{name}", document)
        form = f"grant_type=client_credentials&client_secret={world.tokens['viola']}".encode()
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        issued_token = await world.ask("", "POST", "/v1/oauth/tokens", form, headers=headers)
        self.world.secrets.register("access token", issued_token.json["access_token"], value=True)


HINT_KINDS = (
    *("namespace", "table", "view", "function", "index", "dropped name"),
    *(
        "uuid",
        "snapshot",
        "build",
        "dropped",
        "plan table",
        "plan snapshot",
        "audience",
        "idempotency key",
        "idempotent body",
    ),
    *("location", "metadata file", "manifest list", "manifest", "data file", "view file"),
    *("plan task", "page token", "stage", "moved location", "moved uuid"),
)
"""Kinds of hints. Each campaign gives some kinds to the attacker."""
