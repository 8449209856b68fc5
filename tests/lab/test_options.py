"""Command-line options from the fields of dataclasses."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from blocksparse_lab.cli.options import Given, with_options
from blocksparse_lab.option import option


@dataclass(frozen=True)
class Net:
    width: int = option(8, "Features.")
    sizes: tuple[int, ...] = option((3, 4), "Of layers.")
    seed: int = option(0, "Of weights.")
    hidden_from_users: str = "own"


@dataclass(frozen=True)
class How:
    learning_rate: float = option(0.5, "Of steps.", "lr")
    fast: bool = option(False, "Whether.")
    seed: int = option(0, "Of weights.")


@pytest.fixture
def called():
    """Call a command with these options; return its arguments, or its error."""
    seen = []
    app = typer.Typer()

    @app.command()
    @with_options
    def command(*, out: str = "here", net: Net, how: Annotated[dict[str, Any], How]) -> None:
        seen.append((out, net, how))

    def call(*arguments):
        seen.clear()
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
        return seen[0] if seen else result.output

    return call


def test_defaults_are_those_of_the_dataclasses(called):
    assert called() == ("here", Net(), {"learning_rate": 0.5, "fast": False, "seed": 0})


def test_fields_of_one_name_are_one_option(called):
    out, net, how = called("--seed", "7", "--lr", "0.25", "--sizes", "5,6,7", "--fast", "--out", "there")
    assert (out, net, how) == ("there", Net(sizes=(5, 6, 7), seed=7), {"learning_rate": 0.25, "fast": True, "seed": 7})


def test_a_field_without_help_is_no_option(called):
    assert "No such option" in called("--hidden-from-users", "no")
    shown = called("--help")
    assert "Features." in shown
    assert "[default: 3,4]" in shown
    assert "hidden" not in shown


def test_only_what_was_given():
    seen = []
    app = typer.Typer()

    @app.command()
    @with_options
    def command(*, given: Annotated[dict[str, Any], Given(Net)]) -> None:
        seen.append(given)

    for arguments in ([], ["--width", "8"], ["--sizes", "1"]):
        CliRunner().invoke(app, arguments)
    assert seen == [{}, {"width": 8}, {"sizes": (1,)}]
