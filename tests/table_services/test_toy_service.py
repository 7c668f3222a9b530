"""Tests that a table service of one declaration and two halves is proposed, run, listed, switched and documented."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog

from tests.services.seamark import Seamark
from tests.table_services.toy_service import LABEL
from tests.waits import block_until

SCHEMA = pa.schema([("id", pa.int64())])
PROGRAM = """
import sys
from seamark.formats.services.services import SERVICES
from tests.table_services.toy_service import LABELLING_SERVICE
SERVICES[LABELLING_SERVICE.name] = LABELLING_SERVICE
from tests.table_services import toy_halves
from seamark.commands.main import cli
"""
SERVER = f"{PROGRAM}\nsys.argv[:2] = ['seamark']\ncli()"
COMMANDS = f"""{PROGRAM}
import json
from click.testing import CliRunner
from seamark.commands.reference import write_settings_page
from tests.docs.reference import format_services_table

def run(*words):
    return CliRunner().invoke(cli, words, env={{"SEAMARK_URL": sys.argv[1]}}).output

outputs = {{
    "settings": write_settings_page(),
    "row": format_services_table(),
    "help": run("run", "label", "--help"),
    "invalid": run("policy", "set", "db.t", "seamark.labelling.min-files=few"),
    "problem": run("health", "db.t"),
    "run": run("run", "label", "db.t"),
    "idle": run("run", "label", "db.t"),
    "healthy": run("health", "db.t"),
    "set": run("policy", "set", "db", "--namespace", "seamark.labelling.enabled=true"),
    "policy": run("policy", "show", "db.t"),
}}
print(json.dumps(outputs))
"""


@pytest.mark.slow
def test_declaration_proposer_and_job_make_a_table_service(tmp_path: Path) -> None:
    program = (sys.executable, "-P", "-c", SERVER)
    with Seamark(tmp_path / "home", env={"SEAMARK_SERVICES_WORKERS": "1"}, prefix=program) as server:
        catalog = RestCatalog("s", uri=server.base_url)
        catalog.create_namespace("db")
        table = catalog.create_table("db.t", SCHEMA)
        for number in range(2):
            table.append(pa.table({"id": [number]}, schema=SCHEMA))

        argv = [sys.executable, "-P", "-c", COMMANDS, server.base_url]
        result = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=100)
        outputs = json.loads(result.stdout)
        assert "## services_labelling\n\nLabel tables without the property" in outputs["settings"]
        assert "| `labelling` | `seamark run label` | writes the number of data files" in outputs["row"]
        assert "it writes the number of data files into a table property" in " ".join(outputs["help"].split())
        assert "must be a whole number above 0" in outputs["invalid"]
        assert "wrong label" in outputs["problem"]
        assert "seamark run label db.t, or set seamark.labelling.enabled" in " ".join(outputs["problem"].split())
        assert outputs["run"] == "files 2\n"
        assert outputs["idle"] == "The table service labelling has nothing to do on db.t.\n"
        assert "No problems found." in outputs["healthy"]
        assert "follow the new policy" in outputs["set"]
        actual = {words[0]: words[1:] for words in map(str.split, outputs["policy"].splitlines()) if words}
        assert actual["seamark.labelling.enabled"] == ["true", "namespace", "db"]
        assert actual["seamark.labelling.min-files"] == ["2", "default"]

        # The namespace enables the service, so the scheduler proposes a job after the next commit, and a worker runs
        # it.
        catalog.load_table("db.t").append(pa.table({"id": [2]}, schema=SCHEMA))
        block_until(lambda: catalog.load_table("db.t").properties.get(LABEL) == "3")

        def list_runs() -> list[dict[str, object]]:
            """Return the runs that the console lists."""
            with urlopen(f"{server.base_url}/api/v1/tables/db/t/timeline?action=maintenance") as answer:
                return [instant["summary"] for instant in json.load(answer)["instants"]]

        block_until(lambda: len(list_runs()) == 1)
        (summary,) = list_runs()
        assert (summary["service"], summary["totals"]) == ("labelling", {"files": 3})
