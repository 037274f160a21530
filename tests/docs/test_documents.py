"""The documents are true: their commands run, their code runs, what they name exists.

Every block of every document has a language, and a language says what is done with its blocks:
``console`` and ``python`` run as printed (the README's first of each in a fresh process), ``toml``
is a configuration that is read, ``sh`` is for other machines and is checked word by word, the rest
is for reading.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.conftest import goldfish_here
from typer.main import get_command

from goldfish.cli import app
from goldfish.experiments.config import parse_config
from goldfish.experiments.reference import reference

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
"""The documents, and all other pages: those of results are written by the program."""
COMMANDS: Any = get_command(app)
LANGUAGES = {"console", "python", "toml", "sh", "ini", "nginx", "text"}
"""The unit files (``ini``) and what a page says of Flower are the matter of test_flower_page.py."""


class Block(NamedTuple):
    """A block of code in a document."""

    document: str
    line: int
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    return [block for path in DOCUMENTS for block in _blocks(path) if block.language in languages]


def _blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for found in re.finditer(r"^```(.*?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Block(path.name, text.count("\n", 0, found.start()) + 1, found[1], found[2])


def inline(path: Path) -> list[str]:
    """Return the code within the sentences of a document."""
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def name_of(value: Any) -> str:
    return f"{value.document}:{value.line}" if isinstance(value, Block) else str(value)


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        check=False,
    )


def run_commands(document: str, folder: Path) -> str:
    """Run the commands of a document in order, runs with one round, and return what they said.

    The README's first runs in a fresh process, which takes a while to import all. A configuration
    whose first line is a comment with a file's name lies there under that name.
    """
    for block in blocks("toml"):
        named = re.match(r"# ([\w.-]+\.toml)\n", block.text)
        if named and block.document == document:
            (folder / named[1]).write_text(block.text)
    said, fresh = "", document == "README.md"
    for block in blocks("console"):
        for line in block.text.splitlines() if block.document == document else ():
            command = shlex.split(line)
            if command[0] == "make":  # it would install the project, and test all of it
                done = run(["make", "--dry-run", *command[1:]], ROOT)
            else:
                assert command[0] == "goldfish", f"{name_of(block)}: no way to run {line!r}"
                if command[1] == "run":
                    command += ["--set", "training.rounds=1", "--set", "unlearning.rounds=1"]
                if fresh:
                    done, fresh = run([sys.executable, "-m", *command], folder), False
                else:
                    done = goldfish_here(folder, *command[1:])
            assert done.returncode == 0, (line, done.stderr)
            said += done.stdout
    return said


def test_every_block_has_a_language() -> None:
    found = [block for path in DOCUMENTS for block in _blocks(path)]
    assert len(found) > 15
    unknown = [f"{name_of(b)}: {b.language!r}" for b in found if b.language not in LANGUAGES]
    assert not unknown, "no test knows what to do with these blocks"


@pytest.mark.parametrize("block", blocks("python"), ids=name_of)
def test_code_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "code.py"
    file.write_text(block.text)
    if block.document == "README.md":
        done = run([sys.executable, file.name], tmp_path)
        assert done.returncode == 0, done.stderr
        trained, unlearned = map(int, re.findall(r"samples: (\d+)", done.stdout))
        assert 0 < unlearned < trained
        assert (tmp_path / "unlearned.safetensors").exists()
    else:
        monkeypatch.chdir(tmp_path)
        runpy.run_path(file.name, run_name="__main__")


def test_every_document_with_commands_has_a_test_that_runs_them() -> None:
    here = {"README.md", "performance.md", "audit.md"}
    elsewhere = {"flower.md", "quickstart.md", "own-model.md"}
    assert {block.document for block in blocks("console")} == {*here, *elsewhere}


def test_the_readmes_commands_run(tmp_path: Path) -> None:
    run_commands("README.md", tmp_path)
    assert (tmp_path / "runs" / "experiment" / "report.html").exists()
    again = "goldfish run runs/experiment --resume"
    assert again in inline(ROOT / "README.md")
    done = goldfish_here(tmp_path, *shlex.split(again)[1:])
    assert done.returncode == 0, done.stderr


def test_the_commands_of_the_audit_page_run(tmp_path: Path) -> None:
    said = run_commands("audit.md", tmp_path)
    assert said.count("Forecast: ") == 3
    assert "member-" in said
    assert "epsilon" in said
    assert re.search("retrain: [a-z -]+[.]", said)
    assert 'id="audit"' in (tmp_path / "runs" / "small" / "report.html").read_text()


def test_the_command_of_the_performance_page_prints_all_ratios(tmp_path: Path) -> None:
    said = run_commands("performance.md", tmp_path)
    for words in (
        "engine, 2 clients",
        "of the plain loop",
        "ten rounds of goldfish",
        "of retrain's",
        "complete Goldfish step",
        "of the matrix product",
        "peak memory",
        "Flower's simulation",
    ):
        assert words in said


FEDERATION = """
import torch
from torch import nn
def model():
    return nn.Linear(4, 2)
clients = [goldfish.Client(n, [(torch.randn(4), i % 2) for i in range(9)]) for n in "ab"]
federation = goldfish.InProcess(clients, model)
"""
STATEMENTS = {
    "goldfish.data.DatasetExamples": ("dataset = [([0.0], 0), ([1.0], 1)]", "['a', 'b']"),
    "goldfish.train": (FEDERATION, "federation"),
    "goldfish.unlearn": (
        f"{FEDERATION}\ntrained = goldfish.train(federation, method='sisa')",
        "trained, [goldfish.DeletionRequest('a', sample_ids=['3'])]",
    ),
    "goldfish.plan": (f"{FEDERATION}\ntrained = goldfish.train(federation)", ""),
    "goldfish.InProcess": (FEDERATION, "clients, model"),
    "goldfish.Trained.from_state_dict": (f"{FEDERATION}\nstate = model().state_dict()", ""),
}
"""What must be there before a statement of a sentence runs, and what its ``...`` stand for."""


def statements() -> list[str]:
    """Return the calls of the library that stand in sentences."""
    found = []
    for code in dict.fromkeys(code for path in DOCUMENTS for code in inline(path)):
        try:
            full = re.sub(r"^InProcess\(", "goldfish.InProcess(", code)
            call = ast.parse(full, mode="eval").body
        except SyntaxError:
            continue
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("goldfish."):
            found.append(ast.unparse(call))
    return found


@pytest.mark.parametrize("code", statements())
def test_a_statement_in_a_sentence_runs(code: str) -> None:
    function = code.partition("(")[0]
    assert function in STATEMENTS, f"no way to run {code}"
    before, meant = STATEMENTS[function]
    exec(f"import goldfish\n{before}\n{code.replace('...', meant)}", {})


def test_there_are_statements_in_sentences() -> None:
    assert len(statements()) >= 4


def test_commands_in_sentences_and_for_other_machines_have_options_that_exist() -> None:
    lines = [line for block in blocks("sh") for line in block.text.splitlines()]
    said = [code for path in DOCUMENTS for code in inline(path)]
    commands = [shlex.split(line) for line in lines]
    commands += [shlex.split(c) for c in said if re.match(r"goldfish [a-z]", c)]
    assert len(commands) > 20
    for command in commands:
        program, *words = command
        if Path(program).name == "goldfish":
            _check_options(words)
        elif Path(program).name == "pip":
            extra = re.fullmatch(r"goldfish-fl\[(\w+)\]", words[-1])
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert extra, command
            assert extra[1] in project["optional-dependencies"]
        else:
            assert program in {"python3", "flwr", "sqlite3"}, f"no way to check {command}"


def _check_options(words: list[str]) -> None:
    command: Any = COMMANDS
    rest = list(words)
    while rest and hasattr(command, "commands"):
        assert rest[0] in command.commands, f"there is no 'goldfish {' '.join(words)}'"
        command = command.commands[rest.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    for word in rest:
        assert not word.startswith("-") or word in known, f"{word} of 'goldfish {' '.join(words)}'"


@pytest.mark.parametrize("block", blocks("toml"), ids=name_of)
def test_a_configuration_is_read(block: Block) -> None:
    values = tomllib.loads(block.text)
    assert values
    if "deletion" in values:
        parse_config(values)


def test_make_has_the_targets_that_documents_name() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {
        word for path in DOCUMENTS for c in inline(path) for word in re.findall("^make (.*)", c)
    }
    assert named
    assert named <= set(targets)


def test_every_command_is_documented() -> None:
    names = []
    for name, command in COMMANDS.commands.items():
        inner = getattr(command, "commands", None)
        names += [f"goldfish {name} {sub}" for sub in inner] if inner else [f"goldfish {name}"]
    assert len(names) >= 7
    documents = "".join(path.read_text() for path in DOCUMENTS) + (ROOT / "Makefile").read_text()
    for name in names:
        assert name in documents, f"no document speaks of '{name}'"


def test_the_configuration_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference(), (
        "run: python -m goldfish.experiments.reference > docs/configuration.md"
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(path: Path) -> None:
    """Every `path/in/the/project` and every `test_name` in a document is there."""
    text = path.read_text()
    sources = "".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))
    for name in set(re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]+)`", text)):
        assert (ROOT / name).exists(), f"{path.name} names {name}"
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert f"def {name}(" in sources, f"{path.name} names {name}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_where_a_link_goes_there_is_something(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), f"{path.name} links {target}"
