"""Test that the files of a release state the same version and date."""

import re
import runpy
import shutil

import pytest

from contract.documents import ROOT

FILES = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")
find_problems = runpy.run_path(str(ROOT / "scripts" / "check_version.py"))["find_problems"]


def test_version_changelog_and_citation_agree():
    assert find_problems(ROOT)[1] == []


@pytest.fixture
def released(tmp_path):
    """A copy of the three files as they are when a release is made."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    version = find_problems(tmp_path)[0]
    text = f"# Changelog\n\n## [Unreleased]\n\n## [{version}] - 2026-01-02\n\n- New.\n"
    (tmp_path / "CHANGELOG.md").write_text(text, encoding="utf8")
    citation = (tmp_path / "CITATION.cff").read_text(encoding="utf8")
    citation = re.sub(r"(?<=date-released: )\S+", "2026-01-02", citation)
    (tmp_path / "CITATION.cff").write_text(citation, encoding="utf8")
    return tmp_path


def test_a_release_whose_files_agree_has_no_problem(released):
    assert find_problems(released, is_release=True)[1] == []


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("CITATION.cff", "version: 0", "version: 9", "CITATION.cff has 9"),
        ("CITATION.cff", "2026-01-02", "2026-01-03", "CITATION.cff has 2026-01-03"),
        ("CHANGELOG.md", " - 2026-01-02", "", "YYYY-MM-DD"),
        ("CHANGELOG.md", "Unreleased]\n", "Unreleased]\n\n- Open.\n", "has 1 changes under"),
    ],
)
def test_a_release_whose_files_disagree_is_refused(released, name, old, new, problem):
    path = released / name
    path.write_text(path.read_text(encoding="utf8").replace(old, new), encoding="utf8")

    (line,) = find_problems(released, is_release=True)[1]

    assert problem in line
