"""Whatever bytes a reader is given, it reads them or refuses them in one line."""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from elias import EliasConfig
from elias.data import Corpus, Split, convert, load_corpus
from elias.data.load import TextFile, json_text_rows
from elias.data.readers import files as data_files
from elias.errors import EliasError
from elias.inference.prediction_io import read_predictions

pytestmark = pytest.mark.slow

ODD = [
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b'"', b"\\", b"\r", b"\n", b"\t", b","),
    *(b"-1", b"99999999999999999999", b"1e999", b"NaN", b"[" * 3000, b"{}", b"null", b"'", b"]"),
    *(b"\xe2\x80\xa8", b"__class__", b"|", b";", b":", b"../", b"\x1f\x8b", b"PK\x03\x04", b"PAR1"),
]
GUESSED = {
    "fasttext": b"__label__fish __label__law cod quota\n__label__law red wine\n",
    "no header": b"a cod in the sea\t27\tx1\n'so what'\t3,27\tx2\nred wine is good\t27\tx3\n",
    "indicators": b"id,title,plot,fish,law\n1,cod,the sea,1,0\n2,wine,is good,0,1\n",
    "brackets": b"text,tags\nred wine,<drink><law>\ncod,<fish>\n",
    "hashes": b"text,tags\nred wine,#drink #law\ncod,#fish\n",
    "slashes": b"text,tags\na,x / y\nb,x\nc,z / y\nd,z\ne,y\nf,z / x\n",
    "spaces": b"text,tags\na,x y\nb,x\nc,z y\nd,z\ne,y\nf,z x\n",
    "objects": b'title\tgenres\nHeat\t[{"id": 28, "name": "Action"}]\nCod\t[]\n',
}
"""Files whose layout is recognised by content."""
KINDS = ("jsonl", "csv", "tsv", "parquet", "folder", "pecos", "lf", "xmc", "excel", *GUESSED)


@st.composite
def damage(draw):
    """Draw changes of bytes: a position (as a share), a number to remove, and new bytes."""
    wounds = st.tuples(
        st.floats(0, 1), st.integers(0, 8), st.sampled_from(ODD) | st.binary(max_size=6)
    )
    return draw(st.lists(wounds, min_size=1, max_size=4))


def damaged(content, wounds):
    for share, gone, new in wounds:
        position = int(share * len(content))
        content = content[:position] + new + content[position + gone :]
    return content


def refused_or_done(work):
    """Do something that may be refused, in one line of bounded length."""
    message = ""
    try:
        work()
    except EliasError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1500


def excel_file(rows):
    """Return the bytes of an Excel file."""
    book, buffer = pytest.importorskip("openpyxl").Workbook(), io.BytesIO()
    for row in rows:
        book.active.append(row)
    book.save(buffer)
    return buffer.getvalue()


@cache
def files_of(kind):
    """Return the files of a small corpus in a format, by name."""
    if kind in GUESSED:
        return {"file": GUESSED[kind]}
    if kind == "excel":
        return {"file": excel_file([["text", "tags"], ["red wine", "drink|law"], ["cod", "fish"]])}
    labels = csr_matrix(np.array([[1, 0, 1], [0, 1, 0], [1, 0, 0]], dtype=np.float32))
    split = Split(labels=labels, texts=["cod quota", "red, wine", "sea\n"], features=labels)
    corpus = Corpus(train=split, test=split, label_names=["fish", "drink; all", "law"])
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "corpus"
        convert(corpus, target, kind)
        actual = [target] if target.is_file() else sorted(target.rglob("*"))
        root = target.parent if target.is_file() else target
        return {str(p.relative_to(root)): p.read_bytes() for p in actual if p.is_file()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(wounds=damage(), data=st.data(), packed=st.booleans())
def test_a_damaged_corpus_is_read_or_refused_in_one_line(kind, wounds, data, packed):
    files = files_of(kind)
    name = data.draw(st.sampled_from(sorted(files)))
    with tempfile.TemporaryDirectory() as folder:
        for other, content in files.items():
            path = Path(folder) / other
            path.parent.mkdir(exist_ok=True)
            if other == name and content[:2] == b"\x1f\x8b" and packed:  # inside the compression
                content = gzip.compress(damaged(gzip.decompress(content), wounds))
            elif other == name:
                content = damaged(content, wounds)
            path.write_bytes(content)

        actual = []
        for on_disk in ("off", "on"):
            refused_or_done(lambda how=on_disk: actual.append(read(folder, how)))

    # what is refused in memory is refused on the way to disk, and what is read is the same
    assert len(set(actual)) <= 1
    assert len(actual) != 1


def read(folder, on_disk):
    """Read a corpus with a cache of its own."""
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setattr(data_files, "CHUNK_ROWS", 2)
        return load_corpus(folder, on_disk=on_disk).fingerprint()


@settings(max_examples=150)
@given(content=st.binary(max_size=40) | st.lists(st.sampled_from(ODD), max_size=8).map(b"".join))
def test_any_bytes_are_read_or_refused_in_one_line(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)

        refused_or_done(lambda: load_corpus(path))
        refused_or_done(lambda: list(TextFile.find(path).rows()))
        refused_or_done(lambda: list(TextFile.find(path, text="text").rows()))
        refused_or_done(lambda: read_predictions(path, n_labels=3))


@given(text=st.text(max_size=60))
def test_any_lines_from_standard_input_are_read_or_refused(text):
    refused_or_done(lambda: list(json_text_rows(io.StringIO(text), "stdin", "text")))


@given(wounds=damage(), suffix=st.sampled_from([".json", ".toml"]))
def test_a_damaged_configuration_is_read_or_refused_in_one_line(wounds, suffix):
    toml = b'seed = 3\n[index]\nbeta = 75.0\n[[stages]]\nname = "one"\nepochs = 2\n'
    whole = json.dumps(EliasConfig().to_dict()).encode() if suffix == ".json" else toml
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"config{suffix}"
        path.write_bytes(damaged(whole, wounds))

        refused_or_done(lambda: EliasConfig.from_file(path))
