"""Command-line options from fields of dataclasses (`blocksparse_lab.option`), and shared option types."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from blocksparse.errors import BlockSparseError

Run = Annotated[Path, typer.Option(help="Run folder; resumes an existing run.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the files; by default downloads them.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


@dataclass(frozen=True)
class Given:
    """Marks a dict of the fields of a dataclass that the user set; their options have no defaults."""

    of: type


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a function into a typer command with an option per described field of its dataclass parameters.

    Parameters are keyword-only. A parameter of a dataclass type receives an instance; one of type `Annotated[dict[str,
    Any], DATACLASS]` receives a dict by field names; `Annotated[dict[str, Any], Given(DATACLASS)]` receives the fields
    that the user set. Fields with equal names share an option. Sizes, such as `tuple[int, ...]`, are written with
    commas.
    """
    own = inspect.signature(command, eval_str=True).parameters
    shown: dict[str, inspect.Parameter] = {}
    parsed: dict[str, Callable[[Any], Any]] = {}
    made: dict[str, tuple[type, bool, bool]] = {}
    for name, parameter in own.items():
        (of, only_given), as_dict = _dataclass_of(parameter.annotation), not is_dataclass(parameter.annotation)
        if of is None:
            shown[name] = parameter
            continue
        made[name] = of, as_dict, only_given
        hints = get_type_hints(of)
        for one in filter(lambda one: "help" in one.metadata, fields(of)):
            shown.setdefault(one.name, _option(one, hints[one.name], only_given))
            if hints[one.name] == tuple[int, ...]:
                parsed[one.name] = partial(parse_sizes, name=one.name)

    @wraps(command)
    def called(**given: Any) -> None:
        values = {n: parsed[n](v) if n in parsed and v is not None else v for n, v in given.items()}
        arguments = {name: values[name] for name in own if name not in made}
        for name, (of, as_dict, only_given) in made.items():
            values_of = {one.name: values[one.name] for one in fields(of) if "help" in one.metadata}
            values_of = {key: value for key, value in values_of.items() if value is not None or not only_given}
            arguments[name] = values_of if as_dict else of(**values_of)
        command(**arguments)

    called.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in shown.values()}
    del called.__wrapped__
    return called


def _dataclass_of(annotation: Any) -> tuple[type | None, bool]:
    """Return the dataclass in a parameter's type, and whether it is marked by `Given`."""
    for one in (annotation, *get_args(annotation)[1:]):
        if isinstance(one, Given):
            return one.of, True
        if isinstance(one, type) and is_dataclass(one) and not issubclass(one, typer.models.ParameterInfo):
            return one, False
    return None, False


def _option(dataclass_field: Field[Any], hint: Any, only_given: bool) -> inspect.Parameter:
    """Turn a dataclass field into a typer parameter."""
    flag = f"--{dataclass_field.metadata['option'] or dataclass_field.name.replace('_', '-')}"
    info = typer.Option(flag, help=dataclass_field.metadata["help"])
    default: Any = None if only_given else dataclass_field.default
    if hint == tuple[int, ...]:
        hint, default = str, default and ",".join(map(str, default))
    return inspect.Parameter(
        dataclass_field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint | None if only_given else hint, info],
    )


def parse_sizes(text: str, name: str = "hidden") -> tuple[int, ...]:
    """Parse sizes such as the features of hidden layers.

    >>> parse_sizes("4000,1000,4000")
    (4000, 1000, 4000)
    """
    if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", text):
        raise BlockSparseError.expected(name, "positive ints with commas between, such as 1000,1000", repr(text))
    return tuple(map(int, text.split(",")))


def parse_count(text: str, name: str = "params") -> int:
    """Parse a number, optionally with k, M or G.

    >>> [parse_count(text) for text in ("800k", "2.5M", "1_000")]
    [800000, 2500000, 1000]
    """
    match = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?)\s*([kmgb]?)", text.strip(), re.IGNORECASE)
    if not match:
        raise BlockSparseError.expected(name, "a number such as 800k, 2.5M or 1000000", repr(text))
    number = float(re.sub("[_,]", "", match.group(1)))
    return round(number * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}[match.group(2).lower()])
