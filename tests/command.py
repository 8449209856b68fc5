"""The command line, called in this process."""

from typer.testing import CliRunner

from blocksparse_lab.cli import app


def run(*arguments, code=0, columns=120):
    """The result of `blocksparse` with these arguments, which ends with this exit status."""
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def output(*arguments, code=0):
    """The output of `blocksparse` with single spaces."""
    return " ".join(run(*arguments, code=code).output.split())


def error(*arguments):
    """The one line that a mistake ends in."""
    stderr = run(*arguments, code=1).stderr
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    return stderr
