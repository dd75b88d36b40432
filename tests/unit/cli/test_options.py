import inspect
from dataclasses import dataclass

from elias.cli.options import expand_groups


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
