import inspect
from dataclasses import dataclass

from elias.cli.options import ConfigOptions, expand_groups


@dataclass
class Inner:
    text: str = "title"


@dataclass(kw_only=True)
class Outer:
    path: str
    inner: Inner
    seed: int = 0


def test_the_fields_of_a_group_become_parameters_in_its_position():
    calls = []

    @expand_groups
    def command(*, first: int, group: Outer, last: bool = False) -> None:
        calls.append((first, group, last))

    command(first=1, path="data", text="body", seed=2, last=True)

    assert list(inspect.signature(command).parameters) == ["first", "path", "text", "seed", "last"]
    assert calls == [(1, Outer(path="data", inner=Inner("body"), seed=2), True)]


def test_an_encoder_option_overrides_the_file_and_set_overrides_the_option(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[encoder]\nmodel = "of/file"\npooling = "cls"\n')

    chosen = ConfigOptions(config_file=path, encoder="of/option", changes=["encoder.max_length=9"])
    changed = ConfigOptions(config_file=path, encoder="minilm", changes=["encoder.model=of/set"])

    encoder = chosen.build().encoder
    assert (encoder.model, encoder.pooling, encoder.max_length) == ("of/option", None, 9)
    assert changed.build().encoder.model == "of/set"
    assert ConfigOptions(config_file=path, encoder="bag").build().encoder.kind == "bag"
