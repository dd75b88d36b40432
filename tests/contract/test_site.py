"""The documentation builds as a site without a warning, and needs nothing from elsewhere."""

import os
import re
import subprocess
import sys

import pytest

from contract.documents import ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings_handlers.python")

FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^>]*>")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, and what mkdocs said."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout + done.stderr


def test_the_site_builds_without_a_warning(site):
    folder, message = site

    assert "WARNING" not in message
    assert (folder / "index.html").exists()


def test_every_document_is_a_page(site):
    folder, _ = site

    pages = {path.relative_to(folder).with_suffix(".md") for path in folder.rglob("*.html")}
    ours = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert ours <= pages


def test_a_page_loads_nothing_from_elsewhere(site):
    folder, _ = site

    for path in folder.rglob("*.html"):
        assert not FETCHED.search(path.read_text(encoding="utf8")), path.name
    for path in folder.rglob("*.css"):
        assert "url(http" not in path.read_text(encoding="utf8"), path.name


def test_public_names_are_in_the_reference(site):
    import elias

    folder, _ = site
    page = (folder / "reference" / "python-api.html").read_text(encoding="utf8")

    for name in set(elias.__all__) - {"__version__"}:
        assert re.search(rf'id="elias\.[\w.]*\b{name}"', page), name
    assert "&gt;&gt;&gt;" in page, "examples are shown"
