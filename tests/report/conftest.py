from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from deltafl.experiment import Config, compare, run

SMALL = {
    "task": "digits-softmax",
    "federation": {"clients": 6, "samples": 30, "participation": 0.5},
    "client": {"batch_size": 8},
    "run": {"rounds": 4},
    "engine": {"kind": "inline"},
}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs: two optimizers, two heterogeneities, two seeds; and another task."""
    folder = tmp_path_factory.mktemp("comparison")
    config = Config.model_validate(SMALL)
    compare(config, optimizers=["sgd", "delta-sgd"], alphas=[1, 0.1], seeds=[0, 1], out=folder)
    other = config.override(**{"task": "digits-mlp", "run.record_step_sizes": True})
    run(other, out=folder / "more" / other.run_name)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium on this machine: as root, `make browser` installs it")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page that must stay without errors, and must ask nobody but itself."""
    contexts = []
    problems: list[str] = []

    def start(url: str, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on(
            "console",
            lambda said: problems.append(said.text) if said.type in ("error", "warning") else None,
        )

        def asked(request: Any) -> None:
            own = url if url.startswith("file:") else f"{url.rstrip('/')}/data.json"
            if request.url not in (url, own, "data:,"):
                problems.append(f"request: {request.url}")

        page.on("request", asked)
        page.goto(url)
        return page

    yield start
    for context in contexts:
        context.close()
    assert problems == []
