import os
from types import SimpleNamespace

import pytest

from elias.cli import app


@pytest.mark.parametrize(
    ("command", "set_before", "expected"),
    [("train", None, "passive"), ("train", "active", "active"), ("serve", None, None)],
)
def test_commands_that_train_let_idle_threads_sleep(monkeypatch, command, set_before, expected):
    monkeypatch.setattr(app.talk, "set_up", lambda **_: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", set_before or "")
    if set_before is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")

    app.options(SimpleNamespace(invoked_subcommand=command))

    assert os.environ.get("OMP_WAIT_POLICY") == expected
