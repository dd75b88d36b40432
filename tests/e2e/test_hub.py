"""Models on the hub: pushed to and fetched from a stand-in of it on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from e2e.commands import elias
from e2e.hub_server import TOKEN, go_online, log_in, stand_in
from elias.errors import ModelError
from elias.inference.predictor import Elias
from elias.persistence import hub


@pytest.fixture
def online(monkeypatch, tmp_path):
    """A hub to talk to, an empty cache, and nobody logged in."""
    with stand_in() as (there, address):
        go_online(monkeypatch, address, tmp_path / "hub-cache")
        yield there


@pytest.fixture
def logged_in(online, monkeypatch):
    log_in(monkeypatch)
    return online


def test_a_model_is_loaded_from_the_hub_as_it_was_pushed(model, online):
    address = model.push_to_hub("user/fish", token=TOKEN, message="First")

    again = Elias.from_pretrained("user/fish", device="cpu")
    assert address.endswith("/user/fish")
    assert online.messages == ["First"]
    assert again.predict(["roda"]).to_dicts() == model.predict(["roda"]).to_dicts()
    assert again.components == model.components


def test_a_revision_is_a_branch_of_its_own(model, online):
    model.push_to_hub("user/fish", token=TOKEN)
    model.push_to_hub("user/fish", token=TOKEN, revision="v2")
    online.repos["user/fish"]["main"].clear()

    by_name = Elias.from_pretrained("user/fish@v2", device="cpu")
    by_argument = Elias.from_pretrained("user/fish", revision="v2", device="cpu")

    assert by_name.folder == by_argument.folder
    assert by_name.n_labels == model.n_labels


def test_files_that_a_newer_model_lacks_are_removed_from_the_repository(model, online):
    online.repos["user/fish"] = {"main": {"members/1/config.json": b"{}", "notes.md": b"mine"}}

    model.push_to_hub("user/fish", token=TOKEN)

    there = online.repos["user/fish"]["main"]
    assert "members/1/config.json" not in there
    assert there["notes.md"] == b"mine"


def test_the_card_says_how_good_the_model_is_as_the_hub_reads_it(model, online):
    model.push_to_hub("user/fish", token=TOKEN, license="mit")

    card = ModelCard(online.repos["user/fish"]["main"]["README.md"].decode())
    output = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert card.data.library_name == "elias"
    assert card.data.license == "mit"
    assert card.data.metrics == ["precision", "ndcg", "recall"]
    assert "extreme-classification" in card.data.tags
    assert output == model.metadata["metrics"][model.components[-1]]["test"]
    assert 'Elias.from_pretrained("user/fish")' in card.content


def test_a_card_that_was_never_pushed_is_a_valid_card_too(run, corpus_folder):
    card = ModelCard((run / "model" / "README.md").read_text(encoding="utf8"))

    assert card.data.license is None
    assert card.data.eval_results
    assert f"- Trained on: `{corpus_folder.name}`\n" in card.content


def test_the_command_pushes_and_every_command_reads_from_the_hub(run, logged_in):
    pushed = elias("push", run, "user/fish", "--license", "mit", "-m", "New")
    read = elias("predict", "hf://user/fish", "--device", "cpu", "-k", 1, stdin=b"roda\n")

    assert pushed.code == 0, pushed.err
    assert pushed.out.endswith("/user/fish\n")
    assert logged_in.messages == ["New"]
    assert read.code == 0, read.err
    assert '"text": "roda"' in read.out


def test_a_model_of_the_hub_is_served_and_read_again_when_it_was_pushed_anew(model, online):
    pytest.importorskip("uvicorn")
    from e2e.servers import live

    model.push_to_hub("user/fish", token=TOKEN, revision="v2")
    with live("hf://user/fish@v2") as served, served.client() as client:
        first = client.get("/info").json()
        online.repos["user/fish"]["v2"]["config.json"] += b"\n"  # a commit of its own
        reloading = asyncio.run_coroutine_threadsafe(served.backend.reload(), served.loop)
        again = reloading.result(30) and client.get("/info").json()
        actual = client.post("/predict", json={"inputs": ["roda"], "top_k": 2}).json()

    assert first["model"] == again["model"] == "user/fish@v2"
    assert again["loaded_at"] > first["loaded_at"]
    assert [label["id"] for label in actual[0]] == list(model.predict(["roda"], top_k=2)[0].ids)


# what can go wrong


@pytest.mark.usefixtures("online")
def test_serving_what_is_neither_a_folder_nor_on_the_hub_is_refused():
    pytest.importorskip("uvicorn")

    slip = elias("serve", "./none", "--port", 0)
    missing = elias("serve", "hf://user/none", "--port", 0)

    assert slip.code == missing.code == 2
    assert "none: no such folder; give the folder of a saved model" in slip.err
    assert "user/none: it cannot be downloaded, and the hub has no such repos" in missing.err


@pytest.fixture
def unasked(monkeypatch):
    """A hub that must not be asked."""

    def fail(*_args, **_options):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "snapshot_download", fail)


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize("command", ["predict", "info", "serve"])
@pytest.mark.parametrize("name", ["runs/smal", "user/fish@v2"])
def test_a_path_on_the_command_line_is_never_looked_up_on_the_hub(command, name):
    output = elias(command, name)

    assert output.code == 2
    assert output.err.startswith(f"error: {name}: no such folder; ")
    assert "hf://" in output.err
    assert len(output.err.splitlines()) == 1


@pytest.mark.usefixtures("unasked")
def test_a_served_folder_that_was_moved_away_is_not_looked_up_on_the_hub(
    run, tmp_path, monkeypatch, caplog
):
    pytest.importorskip("uvicorn")
    from e2e.servers import live

    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    served_folder = Path("runs/small")
    served_folder.symlink_to(run)
    with live(served_folder) as served, served.client() as client:
        served_folder.unlink()
        reloading = asyncio.run_coroutine_threadsafe(served.backend.reload(), served.loop)
        was_reloaded = reloading.result(30)
        name = client.get("/info").json()["model"]

    assert not was_reloaded
    assert name == "small"
    assert "runs/small: no such folder" in caplog.text


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize("name", ["./fish", "/none/fish", "~/none-such", "a/b/c", "runs/smal"])
def test_a_string_that_looks_like_a_path_is_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()

    with pytest.raises(ModelError, match=f"^{name}: no such folder"):
        Elias.from_pretrained(name)


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize("name", ["hf://fish", "hf://a/b/c", "hf://"])
def test_a_prefix_without_a_name_of_the_hub_is_refused(name):
    with pytest.raises(ModelError, match=f"^{name}: not a valid hub name; write hf://user/model"):
        Elias.from_pretrained(name)


def test_a_model_on_the_hub_is_not_calibrated_in_place(corpus_folder):
    output = elias("calibrate", "hf://user/fish", corpus_folder)

    assert output.code == 2
    assert (
        "user/fish: a model on the hub cannot be changed; choose a folder with --out" in output.err
    )


@pytest.mark.usefixtures("online")
def test_pushing_without_a_token_says_how_to_get_one(model):
    with pytest.raises(ModelError, match="user/fish: pushing needs a token; log in with `hf auth"):
        model.push_to_hub("user/fish")


@pytest.mark.usefixtures("online")
def test_a_token_without_the_right_to_write_is_refused(model):
    with pytest.raises(ModelError, match=r"user/fish: the hub denies access \(401\)"):
        model.push_to_hub("user/fish", token="hf_other")


@pytest.mark.usefixtures("online")
def test_a_repository_that_is_not_there_may_be_a_mistyped_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which has no folder runs, as a checkout may have
    with pytest.raises(
        ModelError, match="runs/mine: there is no such folder here, and the hub has no"
    ):
        Elias.from_pretrained("runs/mine")


@pytest.mark.usefixtures("online")
def test_a_revision_that_is_not_there_is_named(model):
    model.push_to_hub("user/fish", token=TOKEN)

    with pytest.raises(ModelError, match="user/fish@v9: the repository has no revision 'v9'"):
        Elias.from_pretrained("user/fish@v9")


def test_without_a_network_a_model_that_was_never_fetched_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    output = elias("info", "hf://user/fish")

    assert output.code == 2
    assert output.err.startswith("error: user/fish: it cannot be downloaded, and the hub cannot")
    assert len(output.err.splitlines()) == 1


def test_without_a_network_a_model_that_was_fetched_is_still_there(model, online, monkeypatch):
    model.push_to_hub("user/fish", token=TOKEN)
    first = Elias.from_pretrained("user/fish", device="cpu")
    online.repos.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    again = Elias.from_pretrained("user/fish", device="cpu")

    assert again.folder == first.folder


@pytest.mark.usefixtures("online")
def test_a_name_that_the_hub_does_not_allow_is_refused(model):
    with pytest.raises(ModelError, match="not a valid hub name"):
        model.push_to_hub("user/two--fish", token=TOKEN)


def test_a_revision_of_a_folder_is_refused(run):
    with pytest.raises(ModelError, match="revision='v1' needs a hub name"):
        Elias.from_pretrained(run, revision="v1")
