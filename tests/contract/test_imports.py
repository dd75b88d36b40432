"""Test the import time of the package and the direction of imports between layers."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import elias

ROOT = Path(__file__).parents[2]


def run(code):
    """Run Python code in a fresh interpreter and return what it prints."""
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); {code}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_elias_imports_nothing_heavy():
    heavy = {"torch", "numpy", "scipy", "transformers", "rich", "numba"}

    assert run(f"import elias; print({heavy} & set(sys.modules))") == "set()"


def test_predicting_does_not_wait_for_the_compiler_of_torch():
    code = "import elias.inference.predictor; print('torch._dynamo' in sys.modules)"

    assert run(code) == "False"


def test_the_lower_layers_do_not_import_torch():
    modules = ", ".join(f"elias.{n}" for n in ("config", "errors", "predictions", "metrics"))

    assert run(f"import {modules}, elias.progress; print('torch' in sys.modules)") == "False"


def test_names_on_the_page_of_the_api_are_imported_from_elias():
    page = (ROOT / "docs/reference/python-api.md").read_text(encoding="utf8")
    page = page.partition("## Experiments")[0]  # those say where they are imported from

    names = re.findall(r"^::: elias\.[\w.]*\.(\w+)$", page, re.MULTILINE)

    assert len(names) > 20
    assert set(names) <= set(elias.__all__)


def imported_names(path):
    """Yield the top-level package of every absolute import in a file, lazy ones too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def plain(distribution):
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
    extras = project["optional-dependencies"]
    of_users = ("serve", "export", "excel", "skos", "tensorboard", "wandb", "tune")
    needs = [*project["dependencies"], *(need for name in of_users for need in extras[name])]
    declared = {plain(re.split(r"[^\w.-]", need)[0]) for need in needs}
    files = list((ROOT / "src" / "elias").rglob("*.py"))
    imported = {name for path in files for name in imported_names(path)}
    # torch for CUDA brings Triton along; without it plain torch does the work
    foreign = imported - set(sys.stdlib_module_names) - {"elias", "triton"}
    homes = packages_distributions()

    undeclared = {
        name for name in foreign if not declared & {plain(home) for home in homes.get(name, [name])}
    }

    assert {"torch", "numpy", "huggingface_hub"} <= foreign
    assert not undeclared


def test_public_names_are_listed():
    assert set(elias.__all__) <= set(dir(elias))


@pytest.mark.parametrize("name", [name for name in elias.__all__ if name != "__version__"])
def test_every_public_name_resolves(name):
    assert getattr(elias, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'elias' has no attribute 'nothing'"):
        _ = elias.nothing


def test_the_version_is_known_with_and_without_an_installed_package(monkeypatch):
    import importlib.metadata

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    installed = elias.__version__
    monkeypatch.setattr(importlib.metadata, "version", missing)

    assert installed[0].isdigit()
    assert elias._version() == "0+source"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("elias.pipeline", "Elias"),
        ("elias.pipeline", "train_together"),
        ("elias.data.text_rows", "TextFile"),
        ("elias.onnx_model", "OnnxModel"),
    ],
)
def test_a_documented_name_that_moved_warns_for_one_release(module, name):
    with pytest.warns(DeprecationWarning, match="import it from elias"):
        moved = getattr(importlib.import_module(module), name)

    assert moved is getattr(elias, name)
