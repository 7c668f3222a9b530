"""Copies the console's libraries from npm into `metaserver/api/console/assets/vendor`: `make vendor`.

`package-lock.json` has their versions and integrity, which `npm ci` checks. Nothing is built; only imports by the name
of a package become relative imports, because a browser resolves no names. `read_vendored` returns the content that
the folder must have; a test compares it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "metaserver" / "api" / "console" / "assets" / "vendor"
FILES = {
    "preact.mjs": ("preact", "dist/preact.mjs"),
    "hooks.mjs": ("preact", "hooks/dist/hooks.mjs"),
    "preact.LICENSE.txt": ("preact", "LICENSE"),
    "htm.mjs": ("htm", "dist/htm.mjs"),
    "htm.LICENSE.txt": ("htm", "LICENSE"),
    "uplot.mjs": ("uplot", "dist/uPlot.esm.js"),
    "uplot.css": ("uplot", "dist/uPlot.min.css"),
    "uplot.LICENSE.txt": ("uplot", "LICENSE"),
}
"""File in the folder -> package, file in the package."""
_IMPORTS = {'from"preact"': 'from"./preact.mjs"'}


def read_vendored(modules: Path) -> dict[str, str]:
    """Return the text of each file of the folder `vendor`, by name, from npm's folder `node_modules`.

    Imports of packages become relative, and references to source maps, which are not copied, are removed. The file
    `versions.json` has the version, license and checksum of each package.
    """
    files = {}
    for name, (package, source) in FILES.items():
        text = (modules / package / source).read_text()
        for old, new in _IMPORTS.items():
            text = text.replace(old, new)
        lines = text.splitlines(keepends=True)
        files[name] = "".join(line for line in lines if not line.startswith("//# sourceMappingURL="))
    packages = json.loads((HERE / "package-lock.json").read_text())["packages"]
    versions = {
        package: {key: packages[f"node_modules/{package}"][key] for key in ("version", "license", "integrity")}
        for package in sorted({package for package, _ in FILES.values()})
    }
    files["versions.json"] = json.dumps(versions, indent=2) + "\n"
    return files


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in read_vendored(Path(sys.argv[1])).items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
