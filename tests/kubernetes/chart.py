"""The chart and its rendered manifests. `python -m tests.kubernetes.chart HELM` renders them again with helm."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.services.process import DEPLOY

CHART = DEPLOY / "helm" / "seamark"
RENDERED_FOLDER = Path(__file__).parent / "rendered"
CASES = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))
"""The names of the values files in `ci/`. Each has a file of manifests in `rendered/`."""


def compute_chart_digest() -> str:
    """Return a digest of the chart's files that determine the rendered Kubernetes manifests.

    The schema of the values is not among them, because helm only checks the values with it.
    """
    paths = [path for path in sorted(CHART.rglob("*")) if path.is_file() and path.name != "values.schema.json"]
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(CHART)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def run_helm(helm: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm and return its result, even if it fails."""
    return subprocess.run([str(helm), *arguments], capture_output=True, text=True, timeout=60, check=False)


def render_case(helm: Path, case: str) -> str:
    """Return the manifests of a values file, with a first comment that has the digest of the chart.

    Raises:
        AssertionError: helm fails.
    """
    result = run_helm(helm, "template", "seamark", str(CHART), "-n", "lake", "-f", str(CHART / "ci" / f"{case}.yaml"))
    assert result.returncode == 0, result.stderr
    lines = (line.rstrip() for line in result.stdout.splitlines())
    return f"# Rendered by `make helm` from the chart {compute_chart_digest()}\n" + "\n".join(lines) + "\n"


def read_manifests(case: str) -> list[dict[str, Any]]:
    """Return the committed manifests of a values file."""
    documents = yaml.safe_load_all((RENDERED_FOLDER / f"{case}.yaml").read_text())
    return [document for document in documents if document]


def find_manifest(case: str, kind: str, name: str = "seamark") -> dict[str, Any]:
    """Return the manifest with this kind and name."""
    (manifest,) = (
        manifest
        for manifest in read_manifests(case)
        if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)
    )
    return manifest


def main() -> None:
    """Render the manifests of all values files."""
    for case in CASES:
        (RENDERED_FOLDER / f"{case}.yaml").write_text(render_case(Path(sys.argv[1]), case))


if __name__ == "__main__":
    main()
