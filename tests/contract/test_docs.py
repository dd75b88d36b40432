"""Test the documentation: code runs, commands exist, links have targets.

`documents.py` describes how a document is run.
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import pytest
from typer.main import get_command

from contract.documents import ROOT, Sandbox, blocks_of, shared_interpreter
from elias.cli.app import app
from elias.cli.options import ConfigOptions
from elias.config import EliasConfig
from elias.data.readers.columns import LABEL_COLUMNS, TEXT_COLUMNS

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.sh"))
OURS = [*DOCUMENTS, *SCRIPTS, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.svg"))]

INDENTED = re.compile(r"^    (?P<line>elias .*)$", re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


PLAYED = [path for path in DOCUMENTS if any(block.runs for block in blocks_of(path))]


NEEDS = {
    "export-to-onnx.md": "onnxscript",
    "serve.md": "uvicorn",
    "tune.md": "optuna",
    "tutorial.md": "uvicorn",
}
"""Packages of extras that a document uses."""


@pytest.fixture(scope="module")
def interpreter():
    with shared_interpreter() as address:
        yield address


@pytest.mark.parametrize("document", PLAYED, ids=lambda path: path.name)
def test_the_examples_of_a_document_run_in_order(document, tmp_path, interpreter):
    if document.name in NEEDS:
        pytest.importorskip(NEEDS[document.name])
    if "\ncurl " in document.read_text(encoding="utf8") and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with Sandbox(tmp_path, interpreter) as sandbox:
        for block in blocks_of(document):
            sandbox.run_block(block)


@pytest.mark.parametrize(
    "wrong",
    [
        "```python\nassert 1 == 2\n```",
        "```python\nimport warnings; warnings.warn('old')\n```",
        "```sh\nelias presets | grep nothing\n```",
        "```sh\npip install 'elias-xmc[nothing]'\n```",
        "```console\n$ elias data info none.csv\nerror: …; did you mean 'one.csv'?\n```",
        "<!-- run: false -->\n```sh\ntrue\n```",
    ],
)
def test_a_document_with_a_wrong_output_fails(wrong, tmp_path, interpreter):
    document = tmp_path / "wrong.md"
    document.write_text(wrong + "\n", encoding="utf8")
    (block,) = blocks_of(document)

    with Sandbox(tmp_path, interpreter) as sandbox, pytest.raises(AssertionError):
        sandbox.run_block(block)


def test_the_readme_shows_few_lines_of_python():
    (python,) = (block for block in blocks_of(ROOT / "README.md") if block.language == "python")

    assert len([line for line in python.body.splitlines() if line]) <= 12


def shell_lines():
    """Yield every line of shell in documents and scripts, continued lines joined."""
    for path in [*DOCUMENTS, *SCRIPTS]:
        text = path.read_text(encoding="utf8")
        parts = (
            [text]
            if path.suffix == ".sh"
            else [b.body for b in blocks_of(path) if b.language == "sh"]
        )
        parts += [] if path.suffix == ".sh" else INDENTED.findall(text)
        for line in "\n".join(parts).replace("\\\n", " ").splitlines():
            yield path.name, line


def elias_commands():
    """Yield (document, words) for every use of ``elias``, on either side of a pipe or ``||``."""
    for name, line in shell_lines():
        for part in re.split(r"\|\|?|&&|;", line.partition(" # ")[0]):
            if part.strip().startswith("elias "):
                yield name, tuple(shlex.split(part)[1:])


COMMANDS = sorted(set(elias_commands()))
ELIAS = get_command(app)


@pytest.mark.parametrize("words", sorted({words for _, words in COMMANDS}), ids=" ".join)
def test_every_command_shown_is_one_that_parses(words):
    command, name, rest = ELIAS, "elias", [word for word in words if word != "$@"]

    while hasattr(command, "commands"):
        command.make_context(name, list(rest), resilient_parsing=True)
        name, command, rest = command.resolve_command(None, rest)

    context = command.make_context(name, list(rest))
    assert not context.args
    if name == "train":
        values = context.params
        ConfigOptions(preset=values["preset"], changes=values["changes"]).build()


def test_commands_are_found_in_documents_and_scripts():
    assert {name for name, _ in COMMANDS} >= {"README.md", "results.md", *(s.name for s in SCRIPTS)}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_bash_that_can_be_started(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name
)
def test_every_link_leads_to_something(document):
    for target in LINK.findall(document.read_text(encoding="utf8")):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        assert path.exists(), target
        assert not anchor or anchor in anchors_of(path), target


def anchors_of(document):
    """Return the anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("name", ["configuration", "command-line"])
def test_the_tables_of_keys_and_commands_are_those_of_the_code(name):
    script = f"docs/write_{name.replace('-', '_')}.py"
    written = runpy.run_path(str(ROOT / script))

    page = (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf8")
    assert page == written["page"](), f"run python {script}"


def keys_of(part):
    for name, hint in get_type_hints(part).items():
        inner = next((arg for arg in get_args(hint) if is_dataclass(arg)), hint)
        yield from (f.name for f in fields(inner)) if is_dataclass(inner) else (name,)


def test_every_key_of_the_configuration_is_documented():
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf8")
    documented = set(re.findall(r"^\| `(?:\w+\.(?:NAME\.)?)?(\w+)` \|", page, re.MULTILINE))

    assert set(keys_of(EliasConfig)) == documented


def test_the_columns_that_are_found_by_name_are_listed_in_order():
    page = (ROOT / "docs" / "reference" / "data-formats.md").read_text(encoding="utf8")

    for names in (TEXT_COLUMNS, LABEL_COLUMNS):
        assert f"| {', '.join(f'`{name}`' for name in names)} |" in page


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_no_file_contains_a_local_path_or_a_package_registry(path):
    text = path.read_text(encoding="utf8")

    assert not re.search(r"(?:^|[\s\"'(=`])/(?:work|opt|root|home|tmp|Users)/", text)
    assert not re.search(r"index-url|find-links|://[^/\s]*(?:pypi|simple|artifact|registry)", text)
