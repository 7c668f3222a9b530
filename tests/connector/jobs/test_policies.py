"""Tests of policies of table services: inheritance from namespaces, the services that follow them, and the command."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from seamark.commands.main import cli
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import load_policy, read_effective_properties
from seamark.connector.jobs.server_jobs import expire
from seamark.connector.write.appends import append
from seamark.connector.write.compaction import compact
from seamark.formats.protocol.wire import LEVELS_MAX
from seamark.metaserver.catalog.policies import INHERITED_MAX, PREFIXES, Policies, add_policies
from seamark.metaserver.services.policy import check_policy
from seamark.metaserver.services.proposer import NEVER
from seamark.metaserver.services.watch import TableWatch
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.operations import CreateNamespace
from tests.api.client import SCHEMA as COLUMNS
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_compaction import SCHEMA, build_rows

NAMES = [*(f"{prefix}x" for prefix in PREFIXES), "owner", "seamark.index.i", "location"]
PROPERTIES = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["1", "2", "3"]))


@given(levels=st.lists(PROPERTIES, min_size=1, max_size=4))
def test_policy_of_the_nearest_namespace_has_precedence(levels: list[dict[str, str]]) -> None:
    path = tuple(f"n{number}" for number in range(len(levels)))
    policies: Mapping[str, Any] = {}
    for number, properties in enumerate(levels):
        policies = add_policies(policies, path[: number + 1], properties)
    for name in NAMES:
        defining_levels = [number for number, properties in enumerate(levels) if name in properties]
        if not defining_levels or not name.startswith(PREFIXES):
            assert name not in policies
        else:
            assert policies[name][:2] == (levels[defining_levels[-1]][name], path[: defining_levels[-1] + 1])


@pytest.mark.parametrize(
    ("properties", "expected_error"),
    [
        ({"seamark.compaction.enabled": "true", "seamark.compaction.min-files": "3"}, None),
        ({"seamark.compaction.enabled": "yes"}, "must be true or false"),
        ({"history.expire.max-snapshot-age-ms": "5d"}, "whole number above 0"),
        ({"history.expire.max-snapshot-age-ms": "0"}, "whole number above 0"),
        ({"history.expire.max-snapshot-age-ms": "9" * 5_000}, "whole number above 0"),
        ({"seamark.compaction.when": "1"}, "did you mean seamark.compaction.enabled"),
        ({"x" * 5_000: "1"}, "is unknown; the properties of a policy are"),
    ],
)
def test_policy_with_an_invalid_value_is_refused(properties: dict[str, str], expected_error: str | None) -> None:
    error = check_policy(properties)
    assert error is None if expected_error is None else expected_error in str(error)


@pytest.fixture
def nested_client(client: IndexClient, server: ServerThread) -> IndexClient:
    """Return a client of a server with a table `a.b.t` of six small files."""
    with open_catalog(server.url) as catalog:
        catalog.create_namespace(("a",))
        catalog.create_namespace(("a", "b"))
        catalog.create_table(("a", "b", "t"), SCHEMA)
    for number in range(6):
        append(client, "a.b.t", build_rows([number]))
    return client


def run_policy_command(client: IndexClient, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["policy", "--url", client.url, *arguments])


def read_sources(client: IndexClient) -> dict[str, tuple[str, str, Any]]:
    properties = load_policy(client, "a.b.t")["properties"]
    return {entry["name"]: (entry["value"], entry["source"], entry["namespace"]) for entry in properties}


def test_policy_command_sets_properties_of_a_namespace_and_a_table(nested_client: IndexClient) -> None:
    assert read_sources(nested_client)["seamark.compaction.enabled"] == ("false", "setting", None)
    assert read_sources(nested_client)["seamark.compaction.min-files"] == ("5", "default", None)
    result = run_policy_command(nested_client, "a", "--namespace", "--set", "seamark.compaction.enabled=true")
    assert result.exit_code == 0, result.output
    assert read_sources(nested_client)["seamark.compaction.enabled"] == ("true", "namespace", ["a"])
    run_policy_command(nested_client, "a.b", "--namespace", "--set", "seamark.compaction.enabled=false")
    assert read_sources(nested_client)["seamark.compaction.enabled"] == ("false", "namespace", ["a", "b"])
    answer = run_policy_command(nested_client, "a.b.t", "--set", "seamark.compaction.enabled=true", "--json")
    output, _ = json.JSONDecoder().raw_decode(answer.stdout[answer.stdout.index("{\n") :])  # The output also has logs.
    assert output["properties"][0]["source"] == "table"
    assert read_effective_properties(nested_client, "a.b.t") == {"seamark.compaction.enabled": "true"}
    run_policy_command(nested_client, "a.b.t", "--unset", "seamark.compaction.enabled")
    run_policy_command(nested_client, "a.b", "--namespace", "--unset", "seamark.compaction.enabled")
    assert read_sources(nested_client)["seamark.compaction.enabled"] == ("true", "namespace", ["a"])
    assert "namespace a" in run_policy_command(nested_client, "a.b.t").output


def test_policy_command_reports_each_invalid_argument(nested_client: IndexClient) -> None:
    for arguments, message in (
        (("a.b.t", "--set", "owner=me"), "seamark table set"),
        (("a.b.t", "--set", "seamark.compact.enabled=true"), "did you mean seamark.compaction.enabled"),
        (("a.b", "--namespace", "--unset", "seamark.compacton.enabled"), "did you mean seamark.compaction.enabled"),
        (("a.b.t", "--set", "seamark.compaction.enabled"), "has no value"),
        (("a.b.t", "--set", "seamark.compaction.enabled=1"), "must be true or false"),
        (("a.b", "--namespace"), "add --set or --unset"),
        (("a.b.t", "--set", "seamark.compaction.enabled=true", "--unset", "seamark.compaction.enabled"), "both"),
    ):
        refusal = run_policy_command(nested_client, *arguments)
        assert refusal.exit_code == 2
        assert message in refusal.output
    assert "a.b.none" in run_policy_command(nested_client, "a.b.none").output


def test_nearest_policies_are_kept_if_there_are_too_many() -> None:
    policies: Policies = {}
    # Each namespace sets 160 properties. The namespace below it sets 80 of them again, and 80 others.
    for depth in range(5):
        namespace_properties = {
            f"seamark.compaction.x{number}": str(depth) for number in range(depth * 80, depth * 80 + 160)
        }
        policies = add_policies(policies, ("a",) * (depth + 1), namespace_properties)
    assert len(policies) == INHERITED_MAX
    depth_by_number = {
        int(name.removeprefix("seamark.compaction.x")): policy.value for name, policy in policies.items()
    }
    assert {number for number, depth in depth_by_number.items() if depth == "4"} == set(range(320, 480))
    assert {depth for number, depth in depth_by_number.items() if number < 320} == {"3"}


@pytest.mark.slow
def test_tables_below_a_thousand_namespaces_are_examined(server: ServerThread) -> None:
    """A writer of one namespace can create a thousand namespaces. This must not stop the services of all tables."""
    components = server.components
    watch = TableWatch(components.store, components.timeline, components.catalog.documents.peek, components.clock)
    seen_names: list[str] = []

    def skip_table(entry: Entry, metadata: Any) -> float:
        seen_names.append(entry.name)
        return NEVER

    async def create_namespaces() -> None:
        deep_namespace = ("deep", *("a",) * (LEVELS_MAX - 1))
        operations = [CreateNamespace(deep_namespace[:depth], {}) for depth in range(1, LEVELS_MAX + 1)]
        await components.store.transact(operations)
        answer = await server.api(
            "POST", f"/v1/namespaces/{'%1F'.join(deep_namespace)}/tables", {"name": "t0", "schema": COLUMNS}
        )
        assert answer.status == 200, answer.raw

    server.run(create_namespaces())
    server.run(watch.examine_all(skip_table))
    # pytest deletes folders of earlier runs recursively, and fails at this depth.
    subprocess.run(["rm", "-rf", server.home], check=True)
    assert "t0" in seen_names


def test_services_and_jobs_follow_the_policy_of_a_namespace(nested_client: IndexClient, server: ServerThread) -> None:
    components = server.components
    watch = TableWatch(components.store, components.timeline, components.catalog.documents.peek, components.clock)
    policies: dict[str, dict[str, str]] = {}

    def skip_table(entry: Entry, metadata: Any) -> float:
        policies[entry.name] = metadata.properties
        return NEVER

    run_policy_command(nested_client, "a", "--namespace", "--set", "seamark.compaction.min-files=7")
    run_policy_command(nested_client, "a.b", "--namespace", "--set", "history.expire.max-snapshot-age-ms=1")
    server.run(watch.examine_all(skip_table))
    assert policies["t"]["seamark.compaction.min-files"] == "7"
    assert policies["t"]["history.expire.max-snapshot-age-ms"] == "1"
    actual = server.run(watch.find(("a", "b"), "t"))
    assert actual[1].properties == policies["t"]
    assert compact(nested_client, "a.b.t", dry_run=True).files_before == 0
    assert expire(nested_client, "a.b.t", dry_run=True).snapshots == 5
    assert nested_client.health("a.b.t")["expired-snapshots"] == 5
    run_policy_command(
        nested_client,
        "a.b.t",
        "--set",
        "seamark.compaction.min-files=6",
        "--set",
        "history.expire.max-snapshot-age-ms=9999999",
    )
    assert compact(nested_client, "a.b.t", dry_run=True).files_before == 6
    assert expire(nested_client, "a.b.t", dry_run=True).snapshots == 0


def test_policy_and_health_show_that_a_forbidden_launcher_is_ignored(nested_client: IndexClient) -> None:
    """The property is set on the table or inherited. `test_launchers.py` tests which launcher the jobs use."""
    for arguments in (("a", "--namespace"), ("a.b.t",)):
        run_policy_command(nested_client, *arguments, "--set", "seamark.services.launcher=local")
        (shown_policy,) = [
            item for item in load_policy(nested_client, "a.b.t")["properties"] if item["name"].endswith("launcher")
        ]
        assert shown_policy["ignored"] == "the server permits worker (setting services_launchers)"
        assert "ignored: the" in " ".join(run_policy_command(nested_client, "a.b.t").output.split())
        (problem,) = [
            problem for problem in nested_client.health("a.b.t")["problems"] if problem["problem"] == "ignored property"
        ]
        assert problem["detail"].startswith("seamark.services.launcher is 'local'; the server permits worker")
    run_policy_command(nested_client, "a.b.t", "--set", "seamark.services.launcher=worker")
    assert "ignored" not in run_policy_command(nested_client, "a.b.t").output
