"""Make the figures of the pages, and the table of the README, again: `python docs/refresh.py`.

Each comes from the very command or code that the page shows beside it. Takes about a minute.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
TABLE = re.compile(r"(<!-- demo: [^>]*-->\n\n)\|.*?\n\n", re.S)


def main() -> None:
    """Make everything in a temporary folder, then put it in its place."""
    tutorial = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    partition = re.search(r"^deltafl (partition .*)$", tutorial, re.M)
    steps = next(
        code
        for code in re.findall(r"^```python\n(.*?)^```$", tutorial, re.M | re.S)
        if "step-sizes.svg" in code
    )
    assert partition is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        demo = str(ROOT / "examples" / "demo.toml")
        deltafl(folder, "compare", demo, "--out", "demo")
        seconds = time.perf_counter() - start
        deltafl(folder, *partition[1].split())
        subprocess.run([sys.executable, "-c", steps], cwd=folder, check=True)
        deltafl(folder, "report", "demo", "--out", "report.html")
        photograph(folder / "report.html", IMAGES / "report.png")
        shutil.copyfile(folder / "demo" / "curves.svg", IMAGES / "demo.svg")
        for picture in ("partition.svg", "step-sizes.svg"):
            shutil.copyfile(folder / picture, IMAGES / picture)
        put_table((folder / "demo" / "table.md").read_text(encoding="utf-8"))
    print(f"demo: {seconds:.0f} s on one of {os.cpu_count()} cores")
    print("README.md: does what it says about the table, and its seconds, still hold?")


def deltafl(folder: Path, *words: str) -> None:
    """Run the command line in a folder."""
    subprocess.run([sys.executable, "-m", "deltafl", *words], cwd=folder, check=True)


def photograph(page: Path, image: Path) -> None:
    """Take a picture of the first screens of a page in Debian's chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        view = browser.new_page(viewport={"width": 1100, "height": 1470})
        view.goto(page.as_uri())
        view.screenshot(path=image)
        browser.close()


def put_table(text: str) -> None:
    """Replace the README's table by the rows of table.md."""
    readme = ROOT / "README.md"
    rows = text.partition("\n\n")[0]
    page = readme.read_text(encoding="utf-8")
    changed, count = TABLE.subn(lambda found: f"{found[1]}{rows}\n\n", page)
    assert count == 1
    readme.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    main()
