import errno
import os
import time
from pathlib import Path

import pytest

from elias.data.atomic import evict_oldest, staged_file, staged_folder
from elias.errors import DataError


def test_the_folder_appears_when_the_block_ends(tmp_path):
    with staged_folder(tmp_path / "new" / "corpus") as staging:
        (staging / "file").touch()
        assert not (tmp_path / "new" / "corpus").exists()

    assert [path.name for path in (tmp_path / "new").iterdir()] == ["corpus"]
    assert (tmp_path / "new" / "corpus" / "file").exists()


def test_an_interrupted_block_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path / "corpus"):
        raise KeyboardInterrupt

    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "corpus").mkdir()

    with staged_folder(tmp_path / "corpus") as staging:
        (staging / "file").touch()

    assert (tmp_path / "corpus" / "file").exists()


def aged(folder, seconds, size=10):
    """Make an entry of a cache that was last changed so long ago."""
    folder.mkdir()
    (folder / "file").write_bytes(b"x" * size)
    then = time.time() - seconds
    for path in (folder / "file", folder):
        os.utime(path, (then, then))
    return folder


def test_a_folder_that_may_be_in_use_is_not_evicted(tmp_path):
    new = aged(tmp_path / "new", 0)
    old = aged(tmp_path / "old", 3600)
    in_work = aged(tmp_path / ".a.0123.partial", 7200)
    long_work = aged(tmp_path / ".b.0123.partial", 200_000)
    os.utime(long_work / "file")  # begun days ago, and still written
    abandoned = aged(tmp_path / ".c.0123.partial", 200_000)

    evict_oldest(tmp_path, 5)

    assert set(tmp_path.iterdir()) == {new, in_work, long_work}
    assert not old.exists()
    assert not abandoned.exists()


def test_entries_that_another_process_removes_are_skipped(tmp_path, monkeypatch):
    new, old = aged(tmp_path / "new", 0), aged(tmp_path / "old", 3600)
    gone = [tmp_path / "gone", new, old]
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(gone))

    evict_oldest(tmp_path, 5)

    assert new.exists()
    assert not old.exists()


@pytest.mark.parametrize("name", ["file", "full"])
def test_an_existing_target_is_not_changed(name, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    (tmp_path / "file").touch()

    with pytest.raises(DataError, match="already exists"), staged_folder(tmp_path / name):
        pass

    assert (tmp_path / "full" / "kept").exists()


def test_the_error_of_a_full_disk_names_the_file(tmp_path):
    full, target = OSError(errno.ENOSPC, "No space left on device"), tmp_path / "a.jsonl"

    with pytest.raises(OSError, match="No space left") as caught, staged_file(target):
        raise full

    assert caught.value.filename == str(target)
    assert list(tmp_path.iterdir()) == []
