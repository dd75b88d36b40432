import io
import logging
import sys
import time

import pytest

from elias import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def enabled():
    progress.console.cache_clear()
    progress.enable()
    yield
    progress.enable(False)
    progress.console.cache_clear()


def test_nothing_is_shown_unless_enabled(capsys, caplog):
    caplog.set_level(logging.INFO)

    items = list(progress.track(range(3), "counting"))

    assert items == [0, 1, 2]
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []


@pytest.mark.usefixtures("enabled")
def test_without_a_terminal_slow_work_is_logged(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "SECONDS_BEFORE_LINE", 0.0)

    with progress.progress("counting", 2):
        patience = time.monotonic() + 10
        while not caplog.records and time.monotonic() < patience:
            time.sleep(0.001)

    assert [record.message for record in caplog.records] == ["counting (2) ..."]


@pytest.mark.usefixtures("enabled")
def test_without_a_terminal_short_work_is_not_logged(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "SECONDS_BEFORE_LINE", 0.2)

    items = list(progress.track([1, 2], "counting"))
    time.sleep(0.4)

    assert items == [1, 2]
    assert caplog.records == []


@pytest.mark.usefixtures("enabled")
def test_log_lines_follow_at_intervals_with_count_and_note(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)

    with progress.progress("training", total=1000) as advance:
        advance(500, note="loss 0.3")

    assert caplog.records[-1].message == "training: 500/1,000 in 0 s, loss 0.3"


@pytest.mark.usefixtures("enabled")
def test_log_lines_wait_for_the_interval(caplog):
    caplog.set_level(logging.INFO)

    with progress.progress("training", total=1000) as advance:
        for _ in range(1000):
            advance()

    assert caplog.records == []


@pytest.mark.usefixtures("enabled")
def test_a_terminal_gets_a_bar_on_stderr_and_none_on_stdout(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    with progress.progress("training", total=2) as advance:
        advance(2, note="loss [0.3]")
        print("data")  # noqa: T201 - what a command prints must stay on stdout

    assert "training" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()
    assert "loss [0.3]" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")  # the bar is wiped away
    assert capsys.readouterr().out == "data\n"


@pytest.mark.usefixtures("enabled")
def test_bars_may_nest(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    items = [
        (i, j) for i in progress.track(range(2), "outer") for j in progress.track(range(2), "inner")
    ]

    assert len(items) == 4
    assert "inner" in terminal.getvalue()


@pytest.mark.usefixtures("enabled")
def test_an_error_passes_through_a_bar():
    with pytest.raises(ValueError, match="boom"), progress.progress("failing", total=2):
        raise ValueError("boom")


@pytest.mark.usefixtures("enabled")
def test_a_notebook_shows_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_IN_NOTEBOOK", True)
    monkeypatch.setattr(progress, "SECONDS_BEFORE_BAR", 0.0)

    with progress.progress("counting", 4) as advance:
        advance(4, note="loss 0.1")

    assert "counting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (60, "1 min 0 s"), (150.6, "2 min 31 s")],
)
def test_durations_are_formatted(value, shown):
    assert progress.seconds(value) == shown
