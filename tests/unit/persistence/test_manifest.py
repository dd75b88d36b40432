import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.torch import load_file
from scipy.sparse import random as random_csr

from elias.config import EliasConfig
from elias.errors import ModelError
from elias.model.batch_inference import rank_all
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import build_encoder
from elias.model.graph import LabelGraph, partition_edges
from elias.persistence.manifest import Manifest, fingerprint, write_tensors
from elias.rerank.probabilities import Probabilities
from elias.text.tokens import Tokens
from saved_models import (
    as_old_format,
    change_config,
    change_tensors,
    load,
    reseal,
    write_small_manifest,
)
from saved_models import save as save_parts
from tiny_bert import save_tiny_bert

N_LABELS, N_CLUSTERS = 12, 4
TEXTS = ["red cod", "red herring in the north sea", "", "cod quota in the sea", "red tape"]
NAMES = [f"label {i}" for i in range(N_LABELS - 2)] + ["two\nlines\\", ""]
METADATA = {
    "metrics": {"stage2": {"test": {"P@1": 71.5, "PSP@1": np.float64(3), "R@10": float("nan")}}},
    "data": {"labels": np.int64(12), "splits": {"train": {"points": 1000, "words_mean": 7.25}}},
}
SIZES = SearchSizes(beam_size=2, shortlist_size=6)


def make_config(**encoder):
    changes = {f"encoder.{key}": value for key, value in encoder.items()}
    sizes = {"encoder.dim": 8, "encoder.hidden_dim": 8, "index.n_clusters": N_CLUSTERS}
    return EliasConfig().override(sizes | changes).resolve(1000, N_LABELS)


def make_model(config, *, texts=TEXTS, n_features=None, learned=True):
    encoder = build_encoder(config.encoder, texts, n_features)
    edges = partition_edges(torch.arange(N_LABELS) % N_CLUSTERS, N_CLUSTERS)
    edges = torch.cat([edges, torch.full((N_CLUSTERS, 1), N_LABELS)], dim=1)
    logits = torch.randn(edges.shape) if learned else None
    return EliasModel(encoder, LabelGraph(edges, N_LABELS, 2.5, edge_logits=logits), 3.0)


def save(folder, model, config, *, names=NAMES, **parts):
    return save_parts(folder, model, config, names, **{"metadata": METADATA, **parts})


def assert_predicts_alike(model, again, tokens):
    before = rank_all(model, tokens, SIZES, 5)
    after = rank_all(again, tokens, SIZES, 5)
    np.testing.assert_array_equal(after.ids, before.ids)
    np.testing.assert_array_equal(after.scores, before.scores)


@pytest.fixture
def saved(tmp_path):
    """A saved bag model that a test may damage."""
    config = make_config()
    return save(tmp_path / "model", make_model(config), config)


@pytest.mark.parametrize("learned", [True, False])
def test_a_bag_model_predicts_the_same_after_loading(learned, tmp_path):
    config = make_config()
    model = make_model(config, learned=learned)

    loaded = load(save(tmp_path / "model", model, config), "cpu")

    again = loaded.model
    tokens = model.encoder.tokenize(TEXTS)
    assert_predicts_alike(model, again, again.encoder.tokenize(TEXTS))
    assert again.encoder.fingerprint == model.encoder.fingerprint
    np.testing.assert_array_equal(again.encoder.tokenize(TEXTS).weights, tokens.weights)
    assert again.graph.learned == learned == again.graph.edge_logits.requires_grad
    assert again.graph.edge_labels.dtype == torch.int64
    assert (loaded.config, loaded.label_names) == (config, tuple(NAMES))


def test_labels_in_bfloat16_take_half_the_space_and_predict_the_same_on_a_cpu(tmp_path):
    config = make_config()
    model = make_model(config)
    model.labels.weight.data = model.labels.weight.data.bfloat16().float()  # as a GPU leaves them
    compact = config.override({"index.label_storage": "compact"}).resolve(1000, N_LABELS)

    folders = [save(tmp_path / name, model, one) for name, one in (("a", config), ("b", compact))]
    weights = [load_file(folder / "model.safetensors")["labels.weight"] for folder in folders]

    assert [one.dtype for one in weights] == [torch.float32, torch.bfloat16]
    assert_predicts_alike(model, load(folders[1], "cpu").model, model.encoder.tokenize(TEXTS))


def test_a_model_of_given_features_predicts_the_same_after_loading(tmp_path):
    config = make_config()
    model = make_model(config, texts=None, n_features=9)
    tokens = Tokens.from_csr(random_csr(6, 9, density=0.4, format="csr", rng=0))

    loaded = load(save(tmp_path / "model", model, config))

    assert_predicts_alike(model, loaded.model, tokens)
    assert not (tmp_path / "model" / "vocabulary.txt").exists()


@pytest.mark.parametrize("changes", [{}, {"bottleneck": 5, "pooling": "cls", "max_length": 6}])
def test_a_transformer_model_is_whole_without_the_weights_it_began_with(changes, tmp_path):
    config = make_config(model=save_tiny_bert(tmp_path / "bert"), **changes)
    model = make_model(config)
    folder = save(tmp_path / "model", model, config)
    shutil.rmtree(tmp_path / "bert")

    again = load(folder).model

    assert_predicts_alike(model, again, again.encoder.tokenize(TEXTS))
    assert again.encoder.fingerprint == model.encoder.fingerprint
    assert {path.name for path in (folder / "encoder").iterdir()} == {
        "config.json",
        "tokenizer.json",
    }
    assert str(tmp_path) not in (folder / "encoder" / "config.json").read_text(encoding="utf8")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_a_model_that_could_not_be_loaded_is_not_saved(value, tmp_path):
    compact = make_config().override({"index.label_storage": "compact"})  # 3.4e38: inf in bfloat16
    config = compact.resolve(1000, N_LABELS)
    model = make_model(config)
    model.labels.weight.data[2, 0] = value

    with pytest.raises(ModelError, match=r"labels\.weight has a number that is not finite; lower"):
        save(tmp_path / "model", model, config)

    assert list(tmp_path.iterdir()) == []


def test_every_tensor_is_as_it_was(tmp_path):
    config = make_config()
    model = make_model(config)

    again = load(save(tmp_path / "model", model, config)).model

    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert (again.alpha, again.graph.beta, again.training) == (3.0, 2.5, False)


def test_the_loaded_model_can_be_trained_on(saved):
    model = load(saved).model

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)

    assert load(saved).model.labels.bias.sum() == 0  # the file is not what was changed


def test_the_folder_holds_what_the_format_says(saved):
    names = sorted(path.name for path in saved.iterdir())
    tree = json.loads((saved / "config.json").read_text(encoding="utf8"))
    tensors = load_file(saved / "model.safetensors")

    assert names == [
        "README.md",
        "config.json",
        "labels.tsv",
        "model.safetensors",
        "vocabulary.txt",
    ]
    assert sorted(tree["files"]) == ["labels.tsv", "model.safetensors", "vocabulary.txt"]
    assert tree["files"]["model.safetensors"]["dtypes"] == {
        name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()
    }
    assert (saved / "README.md").read_text(encoding="utf8").startswith("---\nlibrary_name: elias")
    sizes = tree["format_version"], tree["n_labels"], tree["n_clusters"], tree["n_edges"]
    assert sizes == (3, N_LABELS, N_CLUSTERS, 4)
    assert tensors["graph.edge_labels"].dtype == torch.int32
    assert list(saved.parent.iterdir()) == [saved]


def test_all_files_have_the_same_permissions(saved):
    modes = {path.stat().st_mode for path in saved.iterdir()}

    assert len(modes) == 1


def test_metadata_is_loaded_in_json_types(saved):
    metadata = load(saved).metadata

    assert metadata["metrics"]["stage2"]["test"] == {"P@1": 71.5, "PSP@1": 3.0, "R@10": None}
    assert metadata["data"] == {
        "labels": 12,
        "splits": {"train": {"points": 1000, "words_mean": 7.25}},
    }


def test_saving_and_loading_draw_no_random_numbers(tmp_path):
    config = make_config(model=save_tiny_bert(tmp_path / "bert"))
    model = make_model(config)
    before = torch.get_rng_state()

    load(save(tmp_path / "model", model, config))

    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_of_many_labels_keeps_all_names(tmp_path):
    config = make_config()
    n_labels = 200_000
    encoder = build_encoder(config.encoder, TEXTS, None)
    graph = LabelGraph(torch.arange(n_labels).reshape(2000, 100), n_labels, 2.0)
    model = EliasModel(encoder, graph, 3.0)
    names = [f"name {i}" for i in range(n_labels)]
    save(tmp_path / "model", model, config, names=names)

    loaded = load(tmp_path / "model")

    assert list(loaded.label_names) == names


def test_an_existing_folder_is_not_changed(saved):
    config = make_config()
    before = (saved / "model.safetensors").read_bytes()

    with pytest.raises(ModelError, match="already exists"):
        save(saved, make_model(config), config)

    assert (saved / "model.safetensors").read_bytes() == before


def test_a_saved_model_is_replaced_when_asked(saved):
    config = make_config()
    model = make_model(config)

    (saved / "README.md").write_text("# Mine\n")

    save(saved, model, config, overwrite=True)

    assert torch.equal(load(saved).model.labels.weight, model.labels.weight)
    assert (saved / "README.md").read_text(encoding="utf8") != "# Mine\n"
    assert list(saved.parent.iterdir()) == [saved]


def test_a_folder_that_is_no_model_is_never_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").touch()
    config = make_config()

    with pytest.raises(ModelError, match="has no saved model, so it is not overwritten"):
        save(tmp_path / "thesis", make_model(config), config, overwrite=True)

    assert (tmp_path / "thesis" / "chapter").exists()


def test_a_failed_save_leaves_nothing_and_the_old_model_in_place(saved):
    config = make_config()
    before = (saved / "model.safetensors").read_bytes()

    with pytest.raises(TypeError):
        save(saved, make_model(config), config, metadata={"no JSON": object()}, overwrite=True)

    assert (saved / "model.safetensors").read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def refusal(folder):
    """Return the one line with which the folder is refused."""
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def resealed_refusal(folder):
    """Return the refusal of a folder whose checksums fit its files."""
    reseal(folder)
    return refusal(folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    assert "no such folder" in refusal(tmp_path / "nowhere")


def test_a_folder_without_a_config_is_refused(tmp_path):
    assert "has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    "text", ['{"format_version": 1', "", "[" * 100_000, b"\xff\xfe".decode("latin1")]
)
def test_a_config_that_is_not_json_is_refused(text, saved):
    (saved / "config.json").write_bytes(text.encode("latin1"))

    assert "config.json: not valid JSON" in refusal(saved)


def test_a_changed_config_is_refused_even_if_it_makes_sense(saved):
    path = saved / "config.json"
    path.write_text(
        path.read_text(encoding="utf8").replace('"elias_version": "0', '"elias_version": "1')
    )

    assert "config.json: damaged: its SHA-256 checksum is wrong" in refusal(saved)


@pytest.mark.parametrize("tree", [[], {}, {"model_type": "bert"}, {"format_version": "1"}])
def test_a_foreign_config_is_refused(tree, saved):
    (saved / "config.json").write_text(json.dumps(tree), encoding="utf8")

    assert "not saved by ELIAS" in refusal(saved)


@pytest.mark.parametrize("version", [1, 2])
def test_a_model_of_an_older_format_is_read(saved, version):
    before = load(saved)
    as_old_format(saved, version)

    again = load(saved)

    assert torch.equal(again.model.labels.weight, before.model.labels.weight)
    assert again.label_names == before.label_names
    assert again.metadata == before.metadata
    assert again.reranker is None
    assert again.others == []


@pytest.mark.parametrize(
    "settings", [[], "title", {"text": 1}, {"labels": None}, {"seed": -1}, {"seed": "0"}]
)
def test_data_settings_of_another_type_are_refused(saved, settings):
    change_config(saved, data_settings=settings)

    assert "config.json: data_settings" in refusal(saved)


def test_data_settings_are_loaded_as_metadata(tmp_path):
    config = make_config()
    settings = {"text": "title", "labels": "topics", "separator": "|", "seed": 3}
    folder = save(
        tmp_path / "model", make_model(config), config, metadata={"data_settings": settings}
    )

    assert load(folder).metadata == {"data_settings": settings}
    assert Manifest(folder)["data_settings"] == settings
    assert json.loads((folder / "config.json").read_text())["data_settings"] == settings


@pytest.mark.parametrize("beside", [None, [], {"members": -1}, {"members": "2"}])
def test_parts_of_an_old_model_must_be_counted(saved, beside):
    as_old_format(saved)
    change_config(saved, beside=beside)

    assert "config.json: " in refusal(saved)


def test_a_member_is_loaded_and_checked(saved, tmp_path):
    config = make_config()
    member = load(saved)
    folder = save(tmp_path / "ensemble", make_model(config), config, others=[member])

    again = load(folder)

    assert torch.equal(again.others[0].model.labels.weight, member.model.labels.weight)
    change_config(folder / "members" / "1", alpha=2.0)
    assert "members/1/config.json: damaged" in refusal(folder)
    path = folder / "members" / "1" / "labels.tsv"
    path.write_bytes(path.read_bytes().replace(b"label 1", b"label A"))
    assert "members/1/labels.tsv: damaged" in resealed_refusal(folder)
    reseal(folder / "members" / "1")
    assert "members/1: its labels differ from those" in resealed_refusal(folder)


def test_probabilities_are_loaded_and_checked(tmp_path):
    config = make_config()
    steps = np.linspace(0, 1, 201)
    probabilities = Probabilities(np.array([0.0, 1.0]), np.array([0.1, 0.7]), steps, steps[::-1])
    folder = save(tmp_path / "model", make_model(config), config, probabilities=probabilities)

    again = load(folder).probabilities

    np.testing.assert_array_equal(again.values, probabilities.values)
    np.testing.assert_array_equal(again.recall, probabilities.recall)
    path = folder / "probabilities.json"
    path.write_text(path.read_text().replace("0.7", "0.01"))
    assert "probabilities.json: damaged: " in refusal(folder)
    assert "is not monotonic" in resealed_refusal(folder)
    path.write_text('{"format_version": 2}')
    assert "format 2" in resealed_refusal(folder)
    path.unlink()
    assert "probabilities.json: missing" in refusal(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "labels.tsv", "vocabulary.txt"])
def test_a_file_with_one_changed_byte_is_refused(name, saved):
    path = saved / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)

    assert f"{name}: damaged: its SHA-256 checksum" in refusal(saved)


def test_the_file_of_another_model_is_refused(saved, tmp_path):
    config = make_config()
    other = save(tmp_path / "other", make_model(config), config)
    shutil.copy(other / "model.safetensors", saved)

    assert "model.safetensors: damaged" in refusal(saved)


def test_a_file_that_the_manifest_does_not_list_is_refused(saved):
    files = Manifest(saved)["files"]
    change_config(saved, files={name: files[name] for name in files if name != "labels.tsv"})

    assert "labels.tsv: not listed in config.json" in refusal(saved)


def test_the_card_may_be_edited(saved):
    (saved / "README.md").write_text("# My model\n")

    load(saved)


@pytest.mark.parametrize("version", [2, 3])
def test_the_fingerprint_changes_with_the_model(saved, tmp_path, version):
    config = make_config()
    copy = shutil.copytree(saved, tmp_path / "copy")
    other = save(tmp_path / "other", make_model(config), config)
    for folder in (saved, copy, other):
        if version == 2:
            as_old_format(folder)

    assert fingerprint(saved) == fingerprint(copy)
    assert fingerprint(saved) != fingerprint(other)


def test_a_newer_format_asks_for_an_upgrade(saved):
    change_config(saved, format_version=4, elias_version="9.0")

    message = refusal(saved)

    assert "elias-xmc 9.0" in message
    assert message.endswith("upgrade elias-xmc")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_labels", 0),
        ("n_labels", "12"),
        ("n_clusters", None),
        ("n_edges", True),
        ("graph_learned", 1),
        ("alpha", float("inf")),
        ("beta", float("nan")),
        ("encoder", []),
        ("metadata", None),
        ("members", -1),
        ("members", True),
        ("ranker", None),
        ("probabilities", 1),
        ("files", None),
    ],
)
def test_an_impossible_value_is_refused(key, value, saved):
    change_config(saved, **{key: value})

    assert f"config.json: {key} is {value!r}" in refusal(saved)


def test_a_config_with_unknown_keys_is_refused(saved):
    change_config(saved, config={"enkoder": {}})

    assert "unknown key 'enkoder'" in refusal(saved)


@pytest.mark.parametrize(
    ("encoder", "reason"),
    [
        ({"kind": "magic"}, "encoder.kind is 'magic'"),
        ({"kind": "features", "n_features": -1}, "encoder.n_features is -1"),
        ({"kind": "bag", "n_words": 1, "n_ngrams": 0}, "encoder.char_ngrams is None"),
        (
            {"kind": "bag", "n_words": 82, "n_ngrams": 0, "char_ngrams": [3]},
            "char_ngrams is [3], not two",
        ),
        (
            {"kind": "bag", "n_words": 1, "n_ngrams": 0, "char_ngrams": [3, 5]},
            "vocabulary.idf has shape",
        ),
        ({"kind": "transformer"}, "encoder/config.json: missing"),
    ],
)
def test_an_encoder_that_cannot_be_rebuilt_is_refused(encoder, reason, saved):
    change_config(saved, encoder=encoder)

    assert reason in refusal(saved)


@pytest.mark.parametrize("remaining", [0, 5, 100, -1])
def test_weights_cut_short_are_refused(remaining, saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:remaining])

    assert "model.safetensors: truncated or damaged" in resealed_refusal(saved)


def test_weights_with_a_damaged_header_are_refused(saved):
    path = saved / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"#" * 32
    path.write_bytes(content)

    assert "model.safetensors: truncated or damaged" in resealed_refusal(saved)


@pytest.mark.parametrize("name", ["model.safetensors", "labels.tsv", "vocabulary.txt"])
def test_a_missing_file_is_named(name, saved):
    (saved / name).unlink()

    assert f"{name}: missing" in refusal(saved)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels__bias": None}, "labels.bias is missing"),
        ({"vocabulary__idf": None}, "vocabulary.idf is missing"),
        ({"vocabulary__idf": torch.zeros(3)}, "vocabulary.idf has shape (3,)"),
        ({"surprise": torch.zeros(1)}, "surprise is not expected"),
        ({"labels__weight": torch.zeros(3, 8)}, "labels.weight has shape (3, 8), not (12, 8)"),
        ({"labels__bias": torch.zeros(12, dtype=torch.float16)}, "labels.bias is float16"),
        ({"clusters__bias": torch.tensor([0, torch.nan, 0, 0])}, "clusters.bias has a number"),
        ({"clusters__bias": torch.tensor([0, torch.inf, 0, 0])}, "clusters.bias has a number"),
        ({"graph__edge_labels": torch.full((4, 4), 13, dtype=torch.int32)}, "outside 0..12"),
        ({"graph__edge_labels": torch.full((4, 4), -1)}, "outside 0..12"),
        ({"graph__edge_labels": torch.zeros(4, 4)}, "graph.edge_labels is float32"),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(changes, reason, saved):
    change_tensors(saved / "model.safetensors", **changes)

    assert reason in resealed_refusal(saved)


def test_document_frequencies_that_are_not_finite_are_refused(saved):
    idf = load_file(saved / "model.safetensors")["vocabulary.idf"]
    change_tensors(saved / "model.safetensors", vocabulary__idf=idf * torch.nan)

    assert "vocabulary.idf has a number that is not finite" in resealed_refusal(saved)


def test_edges_may_be_stored_as_int64(saved):
    edges = load_file(saved / "model.safetensors")["graph.edge_labels"]
    change_tensors(saved / "model.safetensors", graph__edge_labels=edges.long())
    reseal(saved)

    assert torch.equal(load(saved).model.graph.edge_labels, edges.long())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"name\nonly one\n", "has 2 complete lines, not 13"),
        (b"name\n" + b"a\n" * 13, "has 14 complete lines"),
        (b"name\n" + b"a\n" * 11 + b"cut", "has 12 complete lines"),
        (b"name\n" + b"a\n" * 11 + b"\xff\n", "cannot be read"),
        (b"name\n" + b"a\n" * 11 + b"\\q\n", "labels.tsv:13: a backslash"),
        (b"id\n" + b"a\n" * 12, "has the columns 'id'"),
        (b"name\tname\n" + b"a\tb\n" * 12, r"has the columns 'name\tname'"),
        (b"name\tcolour\n" + b"a\tb\n" * 12, r"has the columns 'name\tcolour'"),
        (b"name\tid\n" + b"a\n" * 12, "not every line has 2 columns"),
    ],
)
def test_label_names_that_do_not_fit_are_refused(content, reason, saved):
    (saved / "labels.tsv").write_bytes(content)

    assert reason in resealed_refusal(saved)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"only one\n", "has 1 complete lines, not 12"),
        (b"a\n" * 11 + b"\\q\n", "labels.txt:12: a backslash"),
    ],
)
def test_label_names_of_an_old_model_that_do_not_fit_are_refused(content, reason, saved):
    as_old_format(saved)
    (saved / "labels.txt").write_bytes(content)

    assert reason in refusal(saved)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
@pytest.mark.parametrize("content", [None, "{"])
def test_a_transformer_without_a_readable_tokenizer_or_config_is_refused(name, content, tmp_path):
    config = make_config(model=save_tiny_bert(tmp_path / "bert"))
    folder = save(tmp_path / "model", make_model(config), config)
    path = folder / "encoder" / name
    path.unlink() if content is None else path.write_text(content)

    reason = "missing" if content is None else "cannot be"
    assert f"encoder/{name}: {reason}" in resealed_refusal(folder)


@given(
    arrays(
        np.float32,
        array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.floats(-(2.0**99), 2.0**99, width=32),
    )
)
def test_eight_bits_differ_by_at_most_half_a_step_of_the_row(matrix):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        tensors = {"m": torch.from_numpy(matrix), "v": torch.from_numpy(matrix[0])}
        write_tensors(path, tensors, "", compact=True)
        stored = load_file(path)
        write_small_manifest(path.parent)

        again = Manifest(Path(folder)).tensors(path.name)

    step = np.abs(matrix).max(axis=1, keepdims=True) / 127
    assert stored["m"].dtype == torch.int8
    assert (np.abs(again["m"].numpy() - matrix) <= 0.5001 * step + 1e-42).all()
    np.testing.assert_array_equal(again["v"], matrix[0])  # not a matrix


@pytest.mark.parametrize("kind", ["bag", "transformer"])
def test_a_compact_model_is_smaller_predicts_nearly_the_same_and_stays_compact(kind, tmp_path):
    changes = {"model": save_tiny_bert(tmp_path / "bert")} if kind == "transformer" else {}
    config = make_config(**changes)
    model = make_model(config)
    full = save(tmp_path / "full", model, config)

    small = save(tmp_path / "small", model, config, compact=True)
    loaded = load(small)
    again = save(tmp_path / "again", loaded.model, config, metadata=loaded.metadata)
    large = save(tmp_path / "large", loaded.model, config, metadata=loaded.metadata, compact=False)

    tokens = model.encoder.tokenize(TEXTS)
    scores = [rank_all(one, tokens, SIZES, 12).scores for one in (model, loaded.model)]
    np.testing.assert_allclose(scores[1], scores[0], atol=0.02)
    weights = [load_file(one / "model.safetensors") for one in (full, small, again, large)]
    assert weights[1]["labels.weight"].dtype == weights[2]["labels.weight"].dtype == torch.int8
    for name, tensor in weights[1].items():
        torch.testing.assert_close(weights[2][name], tensor, rtol=1e-6, atol=0)
    assert weights[3].keys() == weights[0].keys()
    assert loaded.metadata["compact"]
    assert "compact" not in load(large).metadata
    sizes = [(one / "model.safetensors").stat().st_size for one in (full, small)]
    assert sizes[1] < 0.7 * sizes[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"labels__weight": None},
        {"labels__weight": torch.zeros(N_LABELS, 8)},
        {"labels__weight__row_scale": torch.zeros(3)},
    ],
)
def test_scales_without_their_matrix_are_refused(changes, tmp_path):
    config = make_config()
    folder = save(tmp_path / "model", make_model(config), config, compact=True)
    change_tensors(folder / "model.safetensors", **changes)
    reseal(folder)

    assert "labels.weight.row_scale does not fit an 8-bit matrix" in refusal(folder)
