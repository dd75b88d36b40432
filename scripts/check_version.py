"""Check that pyproject.toml, CITATION.cff and CHANGELOG.md name the same version, and print it.

With ``--release``, nothing may be left under "Unreleased", and the version must be new: without a
tag in git.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?$", re.MULTILINE)


def find_problems(root: Path, *, is_release: bool = False) -> tuple[str, list[str]]:
    """Return the version in pyproject.toml, and one line for each problem."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf8"))["project"]
    version: str = project["version"]
    problems = []
    citation = (root / "CITATION.cff").read_text(encoding="utf8")
    cited = re.search(r"^version: *[\"']?([^\s\"']+)", citation, re.MULTILINE)
    if cited is None or cited[1] != version:
        stated = "no version" if cited is None else cited[1]
        problems.append(f"CITATION.cff has {stated}, pyproject.toml {version}; make them equal")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf8")
    headings = list(HEADING.finditer(changelog))
    releases = [heading for heading in headings if heading["version"] != "Unreleased"]
    if not releases or releases[0]["version"] != version or releases[0]["date"] is None:
        newest = releases[0][0] if releases else "no release"
        problems.append(f"CHANGELOG.md has {newest!r} first; write '## [{version}] - YYYY-MM-DD'")
    released = re.search(r"^date-released: *[\"']?([\d-]+)", citation, re.MULTILINE)
    if releases and releases[0]["date"] not in (None, released and released[1]):
        date = "no date-released" if released is None else released[1]
        problems.append(f"CITATION.cff has {date}, CHANGELOG.md {releases[0]['date']}; make equal")
    if is_release:
        open_changes = _open_changes(changelog, headings)
        if open_changes:
            problems.append(
                f"CHANGELOG.md has {open_changes} changes under 'Unreleased'; give the release a "
                "new version, in pyproject.toml and CITATION.cff too, and move them under it"
            )
        tags = ["git", "-C", str(root), "tag", "--list", f"v{version}"]
        if subprocess.run(tags, capture_output=True, text=True, check=False).stdout.strip():
            problems.append(f"git has the tag v{version} already; choose a new version")
    return version, problems


def _open_changes(changelog: str, headings: list[re.Match[str]]) -> int:
    """Return the number of items under 'Unreleased'."""
    if not headings or headings[0]["version"] != "Unreleased":
        return 0
    end = headings[1].start() if len(headings) > 1 else len(changelog)
    return len(re.findall("^- ", changelog[headings[0].end() : end], re.MULTILINE))


def main() -> int:
    """Print the version, and the problems on stderr. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", action="store_true", help="check that it can be published")
    version, problems = find_problems(ROOT, is_release=parser.parse_args().release)
    sys.stdout.write(f"{version}\n")
    sys.stderr.writelines(f"error: {problem}\n" for problem in problems)
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
