"""A server's settings are refused before anything starts, and a key never shows."""

import socket

import pytest

from elias.errors import ConfigError, DataError
from elias.serve import settings
from elias.serve.server import bind, url_of
from elias.serve.settings import Limits, ServeSettings, check_installed, read_keys

KEY = "a-key-of-sixteen-characters"


def test_keys_are_lines_that_are_not_comments(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# for the website\n{KEY}\n\n  {KEY}-2  \n")

    assert read_keys(file) == (KEY, f"{KEY}-2")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "contains no API key"),
        ("short", ":1: a key must have at least"),
        ("# a\nwith a space in it", ":2:"),
    ],
)
def test_a_file_without_a_valid_key_is_refused_without_showing_the_key(content, problem, tmp_path):
    file = tmp_path / "keys"
    file.write_text(content)

    with pytest.raises(ConfigError, match=problem) as refused:
        read_keys(file)

    assert "space in it" not in str(refused.value)


def test_a_missing_key_file_is_named(tmp_path):
    with pytest.raises(DataError, match="nokeys: no such file"):
        read_keys(tmp_path / "nokeys")


@pytest.mark.parametrize("name", ["max_inputs", "max_text", "max_batch", "timeout"])
def test_a_limit_of_zero_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} must be more than 0"):
        Limits(**{name: 0})


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_a_time_that_is_not_finite_is_refused(seconds):
    with pytest.raises(ConfigError, match=f"timeout must be more than 0, not {seconds}"):
        Limits(timeout=seconds)


def test_a_queue_that_no_request_fits_into_is_refused():
    with pytest.raises(ConfigError, match="max_queue 8 is less than max_inputs 64"):
        Limits(max_queue=8)


def test_a_server_listens_on_localhost_by_default(tmp_path):
    assert ServeSettings(model=tmp_path).host == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "labels.example.org"])
def test_a_server_for_other_machines_needs_a_key_or_names(host, tmp_path):
    with pytest.raises(ConfigError, match=f"--host {host}: .* --api-key-file, .* --host-name"):
        ServeSettings(model=tmp_path, host=host)

    ServeSettings(model=tmp_path, host=host, keys=(KEY,))
    ServeSettings(model=tmp_path, host=host, host_names=("localhost",))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_server_for_this_machine_needs_neither(host, tmp_path):
    assert not ServeSettings(model=tmp_path, host=host).is_served("labels.example.org")


@pytest.mark.parametrize(
    "name", ["http://a.example", "a.example:8000", "a/b", "*", "", "Ä.example"]
)
def test_a_host_name_that_no_request_can_have_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="is not a host name"):
        ServeSettings(model=tmp_path, host_names=(name,))


@pytest.mark.parametrize("origin", ["*", "library.example", "https://library.example/", "null"])
def test_what_is_not_an_origin_is_refused(origin, tmp_path):
    with pytest.raises(ConfigError, match=r"--allow-origin .*: is not an origin; give scheme"):
        ServeSettings(model=tmp_path, allow_origins=(origin,))


def test_the_name_of_a_model_never_shows_the_path_to_it(tmp_path):
    assert ServeSettings(model=tmp_path / "moved").name == "moved"
    assert ServeSettings(model="hf://user/fish@v2").name == "user/fish@v2"


def test_a_missing_package_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(settings, "_REQUIRED", ("fastapi_that_nobody_has",))

    with pytest.raises(ConfigError, match=r"fastapi_that_nobody_has.*elias-xmc\[serve\]"):
        check_installed()


def test_an_address_that_is_taken_is_one_line_with_a_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port} .*--port"):
            bind("127.0.0.1", port)


def test_the_url_is_one_that_a_browser_opens():
    with bind("0.0.0.0", 0) as sock:
        assert url_of(sock) == f"http://localhost:{sock.getsockname()[1]}"
