import pytest

from elias.data import load_corpus
from elias.data.readers import files
from elias.errors import DataError


@pytest.mark.parametrize("n_bytes", [1, 3, 1 << 18])
def test_lines_do_not_depend_on_the_block_size(tmp_path, monkeypatch, n_bytes):
    monkeypatch.setattr(files, "READ_BYTES", n_bytes)
    path = tmp_path / "lines.txt"
    path.write_bytes("\ufeffcod\r\n\nœufs\u2028frais\nend".encode())

    assert files.read_lines(path) == ["cod", "", "œufs\u2028frais", "end"]
    assert list(files.iter_lines(path)) == ["cod\r\n", "\n", "œufs\u2028frais\n", "end"]


@pytest.mark.parametrize("n_bytes", [1, 3, 1 << 18])
def test_an_encoding_error_has_a_line_number(tmp_path, monkeypatch, n_bytes):
    monkeypatch.setattr(files, "READ_BYTES", n_bytes)
    path = tmp_path / "lines.txt"
    path.write_bytes(b"cod\nherring\nb\xfccher\nend\n")

    with pytest.raises(DataError, match=r"lines\.txt:3: not UTF-8 \(byte 0xfc\)"):
        files.read_lines(path)


@pytest.mark.parametrize("n_bytes", [1, 1 << 18])
def test_quoted_tsv_cells_are_detected(tmp_path, monkeypatch, n_bytes):
    monkeypatch.setattr(files, "READ_BYTES", n_bytes)
    path = tmp_path / "a.tsv"
    path.write_text('text\tlabels\n5" pipe\tx\n"two\nlines"\ty\n')

    assert load_corpus(path, test_size=0).train.texts == ['5" pipe', "two\nlines"]
