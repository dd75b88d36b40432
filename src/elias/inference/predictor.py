"""The public class `Elias`: a trained model that predicts ranked labels for texts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

import torch
from scipy.sparse import csr_matrix, issparse

from elias.config import ResolvedConfig
from elias.data.corpus import Corpus, Split
from elias.data.load import load_label_table
from elias.data.near_duplicates import NO_GROUPS
from elias.data.splits import DATA_SETTINGS
from elias.distributed import SingleProcess, World
from elias.distributed.sharded_linear import ShardedRows
from elias.errors import ConfigError, DataError, check_positive, did_you_mean
from elias.inference import edit_model
from elias.inference.explain import Explanation, explain
from elias.inference.predict import (
    ENSEMBLE,
    SearchOptions,
    cached_tokens,
    predict,
    split_inputs,
)
from elias.kernels.device import pick_device
from elias.labels import LabelTable
from elias.metrics import EVALUATED, Metrics, evaluate, f1_metrics
from elias.model.batch_inference import BATCH_SIZE
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import TextEncoder
from elias.persistence.hub import find_model, model_card, push
from elias.persistence.manifest import CARD_FILE
from elias.persistence.model_files import load_model, save_model
from elias.predictions import Predictions, Ranking
from elias.rerank.added_labels import AddedLabels
from elias.rerank.probabilities import Probabilities, parse_target
from elias.rerank.reranker import Reranker
from elias.text.tokens import Tokens

TOP_K = 5


class Elias:
    """A trained model that predicts ranked labels for texts.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from elias import Elias, EliasConfig, train
        >>> from elias.data.synthetic import synthetic_corpus
        >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
        >>> config = EliasConfig().override({"encoder.dim": 16, "index.kind": "graph"})
        >>> model = train(corpus, config)

        Save it to a folder and load it again:

        >>> with TemporaryDirectory() as folder:
        ...     saved = model.save_pretrained(Path(folder) / "model")
        ...     model = Elias.from_pretrained(saved)

        Predict a ranking of labels for each text:

        >>> predictions = model.predict(corpus.test.texts, top_k=3)
        >>> len(predictions), len(predictions[0].labels)
        (75, 3)
        >>> model.predict(corpus.test.texts[0], top_k=3).labels == predictions[0].labels
        True
        >>> best, second, third = predictions[0].scores
        >>> best >= second >= third
        np.True_

        Predictions can be limited to some labels, or exclude some, by name or by id:

        >>> few = corpus.label_names[:2]
        >>> sorted(model.predict(corpus.test.texts, only=few)[0].labels) == sorted(few)
        True
        >>> 7 in model.predict(corpus.test.texts, without=[7])[0].ids
        False

        Compute its metrics on the test points, in percent:

        >>> sorted(model.evaluate(corpus))[:3]
        ['P@1', 'P@3', 'P@5']
    """

    def __init__(
        self,
        model: EliasModel,
        config: ResolvedConfig,
        label_names: Sequence[str],
        metadata: dict[str, Any] | None = None,
        *,
        reranker: Reranker | None = None,
        first_encoder: TextEncoder | None = None,
        others: Sequence[Elias] = (),
        probabilities: Probabilities | None = None,
        added: AddedLabels | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.label_names = label_names
        """The names of the labels, as a `LabelTable` if ids, synonyms or descriptions are known."""
        self.metadata = metadata or {}
        """JSON-compatible metadata, such as data statistics, metrics of each stage and timings."""
        self.reranker = reranker
        """The sparse ranker and its calibration (§3.5), or None."""
        self.first_encoder = first_encoder
        """The encoder φ before training, if the ranker uses its embeddings, or None."""
        self.others = tuple(others)
        """The other members of an ensemble."""
        self.probabilities = probabilities
        """The map from scores of the last component to probabilities, or None."""
        self.added = added
        """Labels with no or few training points, which are scored by their texts, or None."""
        self.folder: Path | None = None
        """The folder that the model was loaded from, or None."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return `metadata`. This name is deprecated and will be removed in version 0.3."""
        warnings.warn("Elias.facts is now Elias.metadata", DeprecationWarning, stacklevel=2)
        return self.metadata

    @property
    def members(self) -> tuple[Elias, ...]:
        """Return the members of the ensemble as complete models, or the model itself."""
        if not self.others:
            return (self,)
        return (self.joined_by((), self.config.member(0)), *self.others)

    def joined_by(self, others: Sequence[Elias], config: ResolvedConfig) -> Elias:
        """Return a copy of this model that forms an ensemble with ``others``."""
        joined = copy(self)
        joined.config, joined.others = config, tuple(others)
        joined.probabilities = joined.folder = None
        return joined

    @property
    def components(self) -> tuple[str, ...]:
        """Return the names of the model's components. `predict` uses the last one by default.

        The first component is the last training stage, such as ``stage2``. ``rerank``,
        ``calibrate``, ``names`` and ``ensemble`` follow if the model has them. Each component
        refines the ranking of the previous one.
        """
        ranker = self.reranker
        return (
            self.config.stages[-1].name,
            *(() if ranker is None else ranker.components),
            *((ENSEMBLE,) if self.others else ()),
        )

    @property
    def last_alone(self) -> str:
        """Return the last component before ``ensemble``, whose scores an ensemble averages."""
        return self.components[-2 if self.others else -1]

    def check_component(self, name: str | None) -> str:
        """Check that the model has a component, and return its name. None selects the last one.

        Raises:
            ConfigError: If the model has no such component.
        """
        if name is None:
            return self.components[-1]
        if name not in self.components:
            hint = did_you_mean(name, self.components)
            raise ConfigError(
                f"component {name!r}: no such component{hint} (use one of: "
                f"{', '.join(self.components)}; metrics of earlier stages are in the run's "
                "metrics.jsonl)"
            )
        return name

    @property
    def n_labels(self) -> int:
        """Return L, the number of labels, including added ones."""
        return len(self.label_names)

    def label_frequency(self, label: int) -> int | None:
        """Return the number of training points or examples of a label, or None if unknown."""
        examples = None if self.added is None else self.added.examples_of.get(label)
        if label >= self.model.n_labels or self.reranker is None:
            return examples
        return max(int(self.reranker.frequencies[label]), examples or 0)

    @property
    def data_settings(self) -> dict[str, Any]:
        """Return the arguments of `load_corpus` with which the training data was read.

        ``load_corpus(path, **model.data_settings)`` reads the data again with the same test points.
        The settings are empty if the model was not trained on a file, or was saved by an older
        version.
        """
        settings = dict(self.metadata.get(DATA_SETTINGS, {}))
        return {**settings, "group": settings.get("group", NO_GROUPS)} if settings else {}

    @property
    def label_table(self) -> LabelTable:
        """Return the names of the labels, and their ids, synonyms and descriptions if known."""
        return LabelTable.of(self.label_names)

    @property
    def sizes(self) -> SearchSizes:
        """Return the beam size and the shortlist size of the search."""
        index = self.config.index
        return SearchSizes(index.beam_size, index.shortlist_size)

    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self,
        texts: str,
        *,
        top_k: int | None = ...,
        threshold: float | str | None = ...,
        batch_size: int = ...,
        only: Iterable[int | str] | None = ...,
        without: Iterable[int | str] | None = ...,
        component: str | None = ...,
    ) -> Ranking: ...

    @overload
    def predict(
        self,
        texts: Sequence[str] | csr_matrix,
        *,
        top_k: int | None = ...,
        threshold: float | str | None = ...,
        batch_size: int = ...,
        only: Iterable[int | str] | None = ...,
        without: Iterable[int | str] | None = ...,
        component: str | None = ...,
    ) -> Predictions: ...

    def predict(
        self,
        texts: str | Sequence[str] | csr_matrix,
        *,
        top_k: int | None = None,
        threshold: float | str | None = None,
        batch_size: int = BATCH_SIZE,
        only: Iterable[int | str] | None = None,
        without: Iterable[int | str] | None = None,
        component: str | None = None,
    ) -> Predictions | Ranking:
        """Return the ``top_k`` best labels of each text, sorted by score and then by label id.

        Args:
            texts: A list of texts, or a CSR feature matrix if the model was trained on features.
                For a single text, return its `Ranking` instead of `Predictions`.
            top_k: Maximum number of labels per text. The default is 5, or 100 with a threshold.
            threshold: Minimum probability of a label, or a criterion for choosing the threshold:
                ``"f1"``, ``"macro-f1"``, ``"precision=0.8"`` or ``"recall=0.6"`` (see
                `Probabilities.threshold`).
                If the model has no probabilities, give a number; it is compared with the scores.
            batch_size: Texts per batch. It is reduced if memory runs out. Except for rounding, the
                result does not depend on it.
            only: Ids or names of the labels to choose from. All clusters are searched for them,
                and up to 10,000 of them are ranked.
            without: Ids or names of labels to exclude.
            component: One of `components`. The default is the last one, which uses the whole model.

        Raises:
            DataError: If a text is not a string, or a label is unknown.
            ConfigError: If the model has no such component.
        """
        if top_k is None:
            top_k = TOP_K if threshold is None else EVALUATED
        check_positive(top_k=top_k, batch_size=batch_size)
        component = self.components[-1] if component is None else self.check_component(component)
        if threshold is not None:
            self.threshold(threshold, component)  # raises errors before the search
        inputs = [texts] if isinstance(texts, str) else texts if issparse(texts) else list(texts)
        blocked = None
        if only is not None or without is not None:
            blocked = torch.full((self.n_labels,), only is not None)
            blocked[self.label_ids(() if only is None else only)] = False
            blocked[self.label_ids(() if without is None else without)] = True
        options = SearchOptions(top_k, batch_size, blocked, every_cluster=only is not None)
        predictions = predict(self, inputs, [component], options)[component]
        if threshold is not None:
            predictions = self.assign(predictions, threshold, component)
        return predictions[0] if isinstance(texts, str) else predictions

    def add_labels(
        self,
        labels: str | Path | LabelTable | Any,
        examples: Corpus | Split | Mapping[str, Sequence[str]] | None = None,
        *,
        skip_known: bool = False,
    ) -> Elias:
        """Return a model with additional labels, without training it again.

        A new label is scored by its text (name, synonyms, description) and, if there are any, by
        its examples. The scores of all other labels do not change. See
        [Labels without training points](../explanation/new-labels.md).

        Args:
            labels: Names, or a table of labels (see `elias.load_label_table`).
            examples: Example texts of the new labels: a corpus, whose labels are matched by id or
                name, or a dictionary from names of labels to lists of texts.
            skip_known: Leave out labels that the model has already, for example those of a whole
                vocabulary.

        Raises:
            DataError: If the model has one of the labels already, a label is given twice, or a name
                is empty.

        Example:
            >>> from elias import EliasConfig, train
            >>> from elias.data.synthetic import synthetic_corpus
            >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
            >>> config = EliasConfig().override({"encoder.dim": 16, "index.kind": "graph"})
            >>> model = train(corpus, config)
            >>> larger = model.add_labels(["red herring"], {"red herring": ["a red fish"]})
            >>> larger.n_labels, "red herring" in larger.predict("the red herring").labels
            (31, True)
        """
        table = load_label_table(labels)
        if skip_known:
            known = self.label_table.match(table)
            table = table.take(label for label, match in enumerate(known) if match is None)
        if not len(table):
            return self
        texts, relevance = edit_model.example_texts(table, examples)
        return edit_model.add_labels(self, table, texts, relevance)

    def remove_labels(self, labels: Iterable[int | str]) -> Elias:
        """Return a model without some labels. The remaining labels are renumbered.

        Give each label by its name, its id in the label table, or its number (0 to L − 1). The
        scores of the edges to the remaining labels do not change.
        """
        return edit_model.remove_labels(self, self.label_ids(labels))

    def rename_label(self, label: int | str, name: str) -> Elias:
        """Return a model in which a label has another name. The old name becomes a synonym."""
        return edit_model.rename_label(self, self._one_label(label), name)

    def merge_labels(self, label: int | str, into: int | str) -> Elias:
        """Return a model in which ``label`` is merged into ``into``, which keeps its name and id.

        The two classifiers are averaged, weighted by the labels' numbers of training points. The
        weights of the edges to the two labels are added.
        """
        return edit_model.merge_labels(self, self._one_label(label), self._one_label(into))

    def _one_label(self, label: int | str) -> int:
        first, *others = self.label_ids([label])
        if others:
            raise DataError(
                f"{len(others) + 1} labels are called {label!r}; give the number of one of them: "
                f"{', '.join(map(str, [first, *others][:5]))}"
            )
        return first

    def _probabilities_of(self, component: str | None) -> Probabilities | None:
        """Return the probabilities of a component, which only the last one has."""
        is_last = self.check_component(component) == self.components[-1]
        return self.probabilities if is_last else None

    def keeps_best(self, target: float | str, component: str | None = None) -> bool:
        """Return whether each text gets at least its best label. See `Probabilities.keeps_best`."""
        learned = self._probabilities_of(component)
        return learned is not None and learned.keeps_best(target)

    def threshold(self, target: float | str, component: str | None = None) -> float:
        """Return the threshold for a target. See `Probabilities.threshold`.

        Raises:
            ConfigError: If the target is invalid, or the component has no probabilities.
        """
        parse_target(target)
        if (learned := self._probabilities_of(component)) is not None:
            return learned.threshold(target)
        try:
            return float(target)
        except ValueError:
            raise ConfigError(
                f"threshold {target!r}: the scores of this component have no probabilities; give a "
                "number, or add probabilities to the last component with elias calibrate"
            ) from None

    def assign(
        self, predictions: Predictions, threshold: float | str = "f1", component: str | None = None
    ) -> Predictions:
        """Keep only the labels above a threshold, as `predict` with ``threshold`` does."""
        if (learned := self._probabilities_of(component)) is not None:
            return learned.assign(predictions, threshold)
        return predictions.threshold(self.threshold(threshold, component))

    @overload
    def explain(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self,
        texts: str,
        *,
        top_k: int = ...,
        paths: int = ...,
        member: int = ...,
        words: bool = ...,
    ) -> Explanation: ...

    @overload
    def explain(
        self,
        texts: Sequence[str] | csr_matrix,
        *,
        top_k: int = ...,
        paths: int = ...,
        member: int = ...,
        words: bool = ...,
    ) -> list[Explanation]: ...

    def explain(
        self,
        texts: str | Sequence[str] | csr_matrix,
        *,
        top_k: int = 5,
        paths: int = 3,
        member: int = 0,
        words: bool = False,
    ) -> list[Explanation] | Explanation:
        """Explain the ``top_k`` labels that `predict` returns for each text or for a single text.

        For an ensemble, the labels and scores come from the ensemble, but the clusters and factors
        come from one member.

        Args:
            texts: Texts or features, as for `predict`.
            top_k: Maximum number of labels per text.
            paths: Maximum number of paths per label.
            member: Index of the ensemble member whose clusters and factors are shown. It may have
                no path to a label that only other members found.
            words: Also measure the effect of each word on each label, by leaving the word out of
                the text, and name the terms with the largest weights in the ranker. Each text is
                then predicted up to 200 times.

        Example:
            >>> from elias import EliasConfig, train
            >>> from elias.data.synthetic import synthetic_corpus
            >>> corpus = synthetic_corpus(n_points=300, n_labels=30)
            >>> config = EliasConfig().override({"encoder.dim": 16, "index.kind": "graph"})
            >>> model = train(corpus, config)
            >>> best = model.explain(corpus.test.texts[0], top_k=3).labels[0]
            >>> best.paths[0].won
            True
            >>> bool(abs(best.p - best.classifier_score * best.path_score) < 1e-6)
            True
        """
        if isinstance(texts, str):
            return explain(self, [texts], top_k=top_k, paths=paths, member=member, words=words)[0]
        return explain(self, texts, top_k=top_k, paths=paths, member=member, words=words)

    def predict_split(
        self, split: Split, *, top_k: int = EVALUATED, component: str | None = None
    ) -> Predictions:
        """Predict a split, without the (text, label) pairs that its filter file excludes.

        ``component`` has the same meaning as in `predict`.
        """
        component = self.check_component(component)
        return self.predict_components(split, [component], top_k=top_k)[component]

    def predict_components(
        self, split: Split, components: Sequence[str] | None = None, *, top_k: int = EVALUATED
    ) -> dict[str, Predictions]:
        """Return the predictions of several components for a split, from a single search.

        If ``components`` is None, return the predictions of all components.
        """

        def tokens_of(member: Elias) -> Tokens:
            return cached_tokens(split, member.model.encoder)

        components = self.components if components is None else components
        options = SearchOptions(top_k + split.max_filtered)
        inputs = split_inputs(split, self.model.encoder)
        predictions = predict(self, inputs, components, options, tokens_of)
        return {name: split.drop_filtered(predictions[name], top_k) for name in components}

    def evaluate(
        self,
        corpus: Corpus,
        *,
        split: str = "test",
        component: str | None = None,
        threshold: float | str | None = None,
    ) -> Metrics:
        """Return the metrics on a split of the corpus.

        The propensity constants come from the model's configuration. Labels are matched by name;
        labels that the model does not know count as misses. ``component`` and ``threshold`` have
        the same meaning as in `predict`. Precision, recall and F1 (`f1_metrics`) are measured at
        the threshold, which is ``"f1"`` by default if the model has probabilities.
        """
        corpus = corpus.align_labels(self.label_names)
        predictions = self.predict_split(corpus.split(split), component=component)
        predictions = predictions.among(corpus.label_names)
        a, b = self.config.eval.propensity
        metrics = evaluate(predictions, corpus, split=split, a=a, b=b)
        if predictions.probabilities is not None or threshold is not None:
            assigned = self.assign(predictions, threshold or "f1", component)
            metrics.update(f1_metrics(assigned, corpus.split(split).labels))
        return metrics

    def save_pretrained(
        self, folder: str | Path, *, compact: bool | None = None, overwrite: bool = False
    ) -> Path:
        """Write the model atomically to a folder that `from_pretrained` can load.

        Args:
            folder: A new or empty folder.
            compact: Store matrices in 8 bits and the ranker in 16 bits, about a third of the size.
                The scores change slightly. None does this only if the model was loaded from a
                compact folder.
            overwrite: Replace the model that is saved in ``folder``.

        Raises:
            ModelError: If the folder exists or cannot be written, or a weight is not finite.
        """
        save_model(self, folder, compact=compact, overwrite=overwrite)
        return Path(folder)

    def export_onnx(
        self,
        path: str | Path,
        *,
        top_k: int | None = None,
        int8: bool = False,
        overwrite: bool = False,
    ) -> Path:
        """Write the encoder and the search to one ONNX file for `elias.OnnxModel`.

        The exported model predicts like the last stage (``component="stage2"``), because ranker,
        calibration and probabilities are not exported.

        Args:
            path: The file, which is written atomically.
            top_k: Maximum number of labels that the exported model can predict. None means 100.
            int8: Store matrices as 8-bit integers. The file is smaller, and the scores are
                slightly less exact.
            overwrite: Replace an existing file.

        Raises:
            ModelError: If the file exists, the model cannot be exported, or the packages of the
                extra ``export`` are not installed.
        """
        from elias.persistence.onnx_export import export_onnx  # late import: onnx is an extra

        export_onnx(self, Path(path), top_k=top_k, int8=int8, overwrite=overwrite)
        return Path(path)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        license: str | None = None,
        message: str | None = None,
        token: str | None = None,
    ) -> str:
        """Upload the model and its card to the Hugging Face hub, and return the URL.

        Args:
            repo_id: Repository ``user/name``. It is created if it does not exist.
            private: Whether a new repository is private. None uses the default of the hub.
            revision: Branch, which is created if it does not exist. None uses the main branch.
            license: License identifier for the model card, such as ``mit``. None leaves it out.
            message: Commit message.
            token: Access token. None uses the stored login token.

        Raises:
            ModelError: If there is no token, no write access, or no internet connection.
        """
        card = model_card(
            self.config, self.label_names, self.metadata, name=repo_id, license=license
        )
        with TemporaryDirectory(prefix="elias-push-") as temporary:
            folder = self.save_pretrained(Path(temporary) / "model")
            (folder / CARD_FILE).write_bytes(card.encode("utf8", "replace"))
            return push(
                folder, repo_id, private=private, revision=revision, message=message, token=token
            )

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        revision: str | None = None,
        token: str | None = None,
        device: str = "auto",
        world: World = SingleProcess(),
    ) -> Elias:
        """Load a saved model from its folder, the folder of a finished run, or the hub.

        Args:
            folder: A folder, or ``hf://user/model@revision`` for a model on the Hugging Face hub. A
                string ``user/model`` is also a hub model, unless it looks like a path, that is, it
                starts with ``.``, ``/`` or ``~``, has several ``/``, or its parent folder exists.
                A `Path` is always a folder.
            revision: Branch, tag or commit on the hub.
            token: Access token for a private repository. None uses the stored login token.
            device: ``auto``, ``cpu`` or ``cuda``.
            world: Processes joined by `elias.distributed.joined`. Each process then holds some rows
                of the classifiers on its own device, and ``device`` is ignored. All processes must
                make the same calls, and all get the predictions.

        Raises:
            ModelError: If a file is missing, damaged, not saved by ELIAS, or of a newer format.
        """
        path = find_model(folder, revision=revision, token=token)
        if world.shards_labels:
            model = load_model(cls, path, world.device, partial(ShardedRows.of, world))
        else:
            model = load_model(cls, path, pick_device(device))
        model.folder = path
        return model

    def label_ids(self, labels: Iterable[int | str]) -> list[int]:
        """Return the numbers (0 to L − 1) of labels, each given by number, name or table id.

        If several labels have the same name, return all of them.
        """
        if isinstance(labels, str):
            raise DataError(f"labels must be a list; wrap a name in a list: [{labels!r}]")
        labels, n_labels = list(labels), len(self.label_names)
        by_name: dict[str, list[int]] = {name: [] for name in labels if isinstance(name, str)}
        for i, name in enumerate(self.label_names if by_name else ()):
            if name in by_name:
                by_name[name].append(i)
        for i, key in enumerate(self.label_table.ids or () if by_name else ()):
            if key in by_name and not by_name[key]:
                by_name[key].append(i)
        ids: list[int] = []
        for label in labels:
            if isinstance(label, str):
                known = by_name[label]
                near = "" if known else did_you_mean(label, self.label_names)
                hint = near or "; check the spelling"
            else:
                known = [int(label)] if 0 <= label < n_labels else []
                hint = f"; ids go from 0 to {n_labels - 1}"
            if not known:
                raise DataError(f"the model has no label {label!r}{hint}")
            ids += known
        return ids
