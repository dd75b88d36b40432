"""Train with an encoder of your own: any folder in the Hugging Face format.

Here a tokenizer and a small BERT are made from the texts of the corpus, with random weights, so
that the example downloads nothing. Give the folder of your own pretrained model instead.
"""
# ruff: noqa: T201 - an example shows what it finds
# mypy: disable-error-code=no-untyped-call
# transformers has functions without types

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from elias import EliasConfig, train
from elias.data.synthetic import synthetic_corpus

corpus = synthetic_corpus(n_points=300, n_labels=30)
texts = list(corpus.train.texts or [])
folder = Path("runs/custom-encoder/encoder")

special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
trainer = trainers.WordPieceTrainer(
    vocab_size=500, special_tokens=list(special.values()), show_progress=False
)
tokenizer.train_from_iterator(texts, trainer)
tokenizer.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
sizes = BertConfig(
    vocab_size=tokenizer.get_vocab_size(),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    pad_token_id=tokenizer.token_to_id("[PAD]"),
)
BertModel(sizes).save_pretrained(folder)  # config.json, model.safetensors, tokenizer.json

config = EliasConfig().with_encoder(str(folder)).override({"stages.stage1.epochs": 1})
model = train(corpus, config, out="runs/custom-encoder/run", overwrite=True, device="cpu")
print(model.evaluate(corpus))
print(model.predict(texts[0], top_k=3).labels)
