"""Write what deltafl is made of: results/sbom.cdx.json (CycloneDX) and docs/licences.md.

`make sbom` runs this in the project's environment, and hands it the bill of materials that
cyclonedx-py drew up of it. Only what deltafl and its extras ask for is kept, whatever else is
installed beside it, and nothing that tells one machine or one day from another.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
BILL = ROOT / "results" / "sbom.cdx.json"
TABLE = ROOT / "docs" / "licences.md"
COPYLEFT = re.compile(r"GPL|MPL|EPL|EUPL|CDDL|CC-BY-SA|Mozilla", re.IGNORECASE)
UNKNOWN = "not declared"


def name_of(text: str) -> str:
    """Return a package's name in the one form that pip compares."""
    return re.sub(r"[-_.]+", "-", text).lower()


def closure(root: str, extras: tuple[str, ...] = ()) -> set[str]:
    """Return the packages that one asks for, and those that they ask for, as far as installed."""
    found: set[str] = set()
    todo: list[tuple[str, tuple[str, ...]]] = [(root, extras)]
    seen = set()
    while todo:
        package, asked = todo.pop()
        if (package, asked) in seen:
            continue
        seen.add((package, asked))
        try:
            wanted = metadata.requires(package) or []
        except metadata.PackageNotFoundError:
            continue  # for another system, or another Python
        found.add(package)
        for line in wanted:
            need = Requirement(line)
            if need.marker is None or any(
                need.marker.evaluate({"extra": extra}) for extra in ("", *asked)
            ):
                todo.append((name_of(need.name), tuple(sorted(need.extras))))
    return found


def licence(package: str) -> str:
    """Return the licence that a package declares, in as few words as it does."""
    about = metadata.metadata(package)
    if expression := about.get("License-Expression"):
        return str(expression)
    classified = [
        str(line).rpartition(" :: ")[2]
        for line in about.get_all("Classifier") or []
        if str(line).startswith("License :: ") and not str(line).endswith("OSI Approved")
    ]
    if classified:
        return ", ".join(classified)
    text = str(about.get("License") or "").strip()
    if text and text != "UNKNOWN":
        return text.splitlines()[0][:60]
    return UNKNOWN


def groups() -> dict[str, str]:
    """Return every package but deltafl itself, and the first of its parts that needs it."""
    found: dict[str, str] = {}
    for extra in ("", "text", "ray", "flower", "track", "docs", "dev"):
        for package in sorted(closure("deltafl", (extra,) if extra else ())):
            found.setdefault(package, extra or "core")
    del found["deltafl"]
    return dict(sorted(found.items()))


def table(packages: dict[str, str]) -> str:
    """Return the licences as a page of the documentation."""
    flagged, silent, rows = [], [], []
    for package, group in packages.items():
        told = licence(package)
        mark = ""
        if COPYLEFT.search(told):
            flagged.append(package)
            mark = "copyleft"
        elif told == UNKNOWN:
            silent.append(package)
            mark = "ask"
        cells = (package, _public(metadata.version(package)), group, told, mark)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            "# Licences",
            "",
            "deltafl is under the MIT licence. This is what it asks pip to install beside it, with",
            "the licence each package declares; `make sbom` writes this page and",
            "`results/sbom.cdx.json`. *Needed by* is `core`, or the extra without which the",
            "package is not installed.",
            "",
            f"{len(packages)} packages. Copyleft: {', '.join(flagged) or 'none'}. "
            f"Without a declared licence: {', '.join(silent) or 'none'}.",
            "None of them is part of deltafl's own files: it imports them, changed by nobody.",
            "",
            "| package | version | needed by | licence | |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _public(version: str) -> str:
    """Drop what only says how a package was built, as in 2.13.0+cpu."""
    return version.partition("+")[0]


def bill(drawn_up: dict[str, Any], packages: set[str]) -> str:
    """Return the bill of materials of these packages: no paths, no addresses, always the same."""
    kept = []
    for component in drawn_up["components"]:
        if name_of(component["name"]) in packages | {"deltafl"}:
            for wordy in ("externalReferences", "description", "evidence"):
                component.pop(wordy, None)
            kept.append(component)
    refs = {component["bom-ref"] for component in kept}
    links = [
        {**link, "dependsOn": sorted(set(link.get("dependsOn", ())) & refs)}
        for link in drawn_up["dependencies"]
        if link["ref"] in refs
    ]
    tools = drawn_up["metadata"]["tools"]["components"]
    short = [
        {key: tool[key] for key in ("type", "name", "version") if key in tool} for tool in tools
    ]
    tree = {
        **drawn_up,
        "metadata": {"tools": {"components": short}},
        "components": sorted(kept, key=lambda component: str(component["bom-ref"])),
        "dependencies": sorted(links, key=lambda link: str(link["ref"])),
    }
    return json.dumps(tree, indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Write both files from cyclonedx-py's bill on standard input."""
    packages = groups()
    BILL.write_text(bill(json.load(sys.stdin), set(packages)), encoding="utf-8")
    TABLE.write_text(table(packages), encoding="utf-8")
    print(f"{BILL.relative_to(ROOT)} and {TABLE.relative_to(ROOT)}: {len(packages)} packages")


if __name__ == "__main__":
    main()
