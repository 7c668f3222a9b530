"""Run Iceberg's REST compatibility kit (`run.sh`) against a URI, and read its report.

The kit needs an empty server and writes tables to `file:/tmp/<namespace>/<table>` (hard-coded in it), and views below
`java.io.tmpdir`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from tests.services.java import RCK, SHORT_LIVED, find_java_17

# The kit itself skips these tests, whatever the server supports. Its base class returns false for empty namespaces,
# nested namespaces and names with slashes, and one test is disabled.
DISABLED_BY_THE_KIT = frozenset(
    {
        "createTableInUniqueLocation()",
        "createAndDropEmptyNamespace()",
        "listNamespacesWithEmptyNamespace()",
        "listTablesInEmptyNamespace()",
        "listViewsInEmptyNamespace()",
        "namespacePropertiesOnEmptyNamespace()",
        "testDropNamespaceWithNestedNamespace()",
        "testListNestedNamespaces()",
        "testNamespaceWithSlash()",
        "testTableNameWithSlash()",
    }
)

# The kit disables this option because its own fixture does not support it. Seamark supports it.
OPTIONS = ("-Drck.supports-names-with-dot=true",)


# The kit's tables are in these folders, one for each of its namespaces.
KIT_FOLDERS = tuple(Path("/tmp") / namespace for namespace in ("ns", "newdb", "ns1", "ns2", "other_ns"))


@dataclass(frozen=True)
class KitReport:
    """The outcome of a run of Iceberg's REST compatibility kit.

    Attributes:
        tests: The number of tests.
        skipped_tests: The names of skipped tests.
        failures: The messages of failures by test.
    """

    tests: int
    skipped_tests: frozenset[str]
    failures: dict[str, str]


def read_report(path: Path) -> KitReport:
    """Read JUnit's XML report."""
    skipped_tests, failures, count = set(), {}, 0
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        count += 1
        name = case.get("name", "")
        if case.find("skipped") is not None:
            skipped_tests.add(name)
        for element_name in ("failure", "error"):
            element = case.find(element_name)
            if element is not None:
                failures[name] = (element.get("message") or element.text or "").strip()[:500]
    return KitReport(count, frozenset(skipped_tests), failures)


def run_kit(uri: str, folder: Path, *, warehouse: str = "", test_selector: str = "all") -> KitReport:
    """Run the kit (20 to 60 s) against `uri`. Output and report stay in `folder`.

    Args:
        uri: The URI of the catalog.
        folder: A folder for the output, the report and temporary files.
        warehouse: The warehouse to request. Without it the kit requests `rck_warehouse`.
        test_selector: The tests to run: all, catalog, view or a JUnit selector.
    """
    temporary_folder = folder / "tmp"
    temporary_folder.mkdir(parents=True)
    java_home = Path(find_java_17()).parent.parent
    env = {
        **os.environ,
        "PATH": f"{java_home / 'bin'}:{os.environ['PATH']}",
        "REPORTS": str(folder / "reports"),
        "RCK_OPTS": " ".join([*OPTIONS, *SHORT_LIVED, f"-Djava.io.tmpdir={temporary_folder}"]),
        "TMPDIR": str(temporary_folder),
    }
    new_folders = [path for path in KIT_FOLDERS if not path.exists()]
    try:
        with (folder / "rck.log").open("wb") as log_file:
            subprocess.run(
                ["bash", str(RCK / "run.sh"), uri, warehouse, test_selector],
                env=env,
                stdout=log_file,
                stderr=log_file,
                timeout=900,  # A busy machine may take many times as long as the usual 60 s.
            )
    finally:
        for path in new_folders:
            shutil.rmtree(path, ignore_errors=True)
    report = folder / "reports" / "TEST-junit-jupiter.xml"
    if not report.exists():
        raise AssertionError(f"the kit wrote no report:\n{(folder / 'rck.log').read_text()[-4000:]}")
    return read_report(report)
