"""The examples of the README and of every page run, and what the pages name exists.

Pages are read from top to bottom in one temporary folder: a Python block runs in a namespace of its
own, a block with a title becomes a file, and every `deltafl` line of a shell block runs, on the
embedded digits. To be quick, rounds are cut to two, and clients run in this process unless the
page names an engine. `<!-- not run: why -->` before a block keeps it from running; its Python still
has to compile, and the options of its commands still have to be valid.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from deltafl.cli import COMMANDS, arguments, main, paper
from deltafl.cli.command import Command, read
from deltafl.cli.data import known_names
from deltafl.engine import InlineEngine
from deltafl.experiment import Config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(
    r"(?P<skip><!-- not run: [^>]+ -->\n)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.M | re.S,
)
SHELL = ("bash", "console")
# Commands of other programs that may stand in a shell block.
OTHERS = {"make", "python3", ".venv/bin/pip"}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    title: str | None
    text: str
    runs: bool

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    return [
        Block(
            page.name,
            source.count("\n", 0, found.start("text")) + 1,
            found["language"],
            found["title"],
            found["text"],
            found["skip"] is None,
        )
        for found in FENCE.finditer(source)
    ]


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of every command of a shell block, without prompts and variables."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if block.language == "console" and not line.startswith("$ "):
            continue  # what the command printed
        if words:
            yield words


def is_deltafl(words: list[str]) -> bool:
    return Path(words[0]).name == "deltafl"


def check(words: list[str]) -> None:
    """Raise unless the options of a command are valid; runs nothing."""
    name, *rest = words
    command = COMMANDS[name]
    if isinstance(command, Command):
        read(command.options, rest, command.positional)
    elif command is paper.COMMAND:
        paper.ACTIONS[rest[0]].read(rest[1:])
    else:
        assert set(rest[1:]) <= {*known_names(), "all"}, f"no such data set in {words}"
        assert rest[0] in ("list", "get", "verify"), f"no such action in {words}"


ROUNDS = 2


def quick(words: list[str]) -> list[str]:
    """Return the command with few rounds."""
    if words[0] not in ("run", "compare", "tune"):
        return words
    words = list(words)
    if "--run.rounds" not in words:
        words += ["--run.rounds", ""]
    words[words.index("--run.rounds") + 1] = str(ROUNDS)
    return words


def shorter(text: str) -> str:
    """Return a configuration, in Python, with few rounds."""
    return re.sub(r'"rounds": \d+', f'"rounds": {ROUNDS}', text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of its own, from which modules can be imported, as with PYTHONPATH=."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    threads, known = torch.get_num_threads(), set(sys.modules)
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(
    page: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "engine.kind workers" not in page.read_text(encoding="utf-8"):
        monkeypatch.setattr("deltafl.engine.build", lambda *_: InlineEngine())
    for block in blocks(page):
        if block.title is not None:
            (folder / block.title).write_text(block.text, encoding="utf-8")
        if block.language == "python":
            run_python(block)
        elif block.language in SHELL:
            for words in commands(block):
                run_command(block, words, capsys)


def run_python(block: Block) -> None:
    # Filled up, so that a traceback shows the line of the page.
    source = "\n" * (block.line - 1) + shorter(block.text)
    code = compile(source, block.page, "exec")
    if block.runs and block.title is None:
        exec(code, {"__name__": "__main__"})


def run_command(block: Block, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if not is_deltafl(words):
        assert words[0] in OTHERS, f"{block.place}: unknown command {words[0]}"
        return
    check(words[1:])
    if not block.runs:
        return
    capsys.readouterr()
    code = main(quick(words[1:]))
    assert code == 0, f"{block.place}: {shlex.join(words)}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_are_valid(
    page: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`deltafl ...` between backticks has valid options, and `make ...` is a target."""
    (folder / "experiment.toml").touch()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    options = {name for name, _ in arguments.options(Config)}
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for span in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text):
        words = span.split()
        if words[0] == "deltafl" and len(words) > 1:
            if len(words) > 2:
                check(words[1:])
            else:
                assert words[1] in COMMANDS, span
        elif words[0] == "make" and len(words) == 2:
            assert words[1] in targets, span
        elif re.match(r"--\w+\.", words[0]):
            assert words[0][2:] in options, span


def test_every_page_says_something_that_runs() -> None:
    """Guards the pattern: a page whose blocks are no longer found would pass in silence."""
    found = {page.name: [b.language for b in blocks(page)] for page in PAGES}
    assert found["README.md"].count("python") >= 2
    assert found["tutorial.md"].count("python") >= 6
    assert sum(language in SHELL for language in found["tutorial.md"]) >= 8
    fences = {page.name: page.read_text(encoding="utf-8").count("```") for page in PAGES}
    assert {name: 2 * len(languages) for name, languages in found.items()} == fences


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    """Files in backticks, tests in `file::test`, and functions in "`name` in `file`"."""
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:deltafl|tests|examples)/[\w./-]+)", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", text):
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"
    for name, file in re.findall(r"`(\w+)(?:\.\w+)?` in\s+`([\w/]+\.py)`", text):
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"\b(def|class) {name}\b", source), f"{page.name}: {name} in {file}"
    for link in re.findall(r"\]\(((?!http)[\w./-]+)(?:#[\w-]+)?\)", text):
        place = page.parent / link
        if link.startswith("images/paper/"):  # the site's hooks put them there
            place = ROOT / "results" / "paper" / "figures" / place.name
        assert place.exists(), f"{page.name} links to {link}"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_options_has_them_all(hooks: ModuleType) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    made = hooks.on_page_markdown(page)
    for name, field in arguments.options(Config):
        key = name.rpartition(".")[2].replace("-", "_")
        assert f"| `{key}` |" in made
        assert field.description, f"{name} has no description"
    assert "| `batch_size` | INT | `64` | samples of a step (b) |" in made
    assert "insert:" not in made


def test_an_insert_that_is_not_known_stops_the_build(hooks: ModuleType) -> None:
    with pytest.raises(KeyError):
        hooks.on_page_markdown("<!-- insert: nothing_of_the_kind -->")


def test_a_broken_example_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "page.md"
    page.write_text(
        textwrap.dedent(
            """\
            ```python
            raise RuntimeError("line 2")
            ```
            ```bash
            deltafl run --run.ronds 3
            ```
            """
        )
    )
    python, shell = blocks(page)
    with pytest.raises(RuntimeError, match="line 2") as error:
        run_python(python)
    assert error.traceback[-1].lineno == 1  # counts from 0
    with pytest.raises(Exception, match=r"did you mean --run\.rounds"):
        run_command(shell, next(commands(shell)), capsys)
