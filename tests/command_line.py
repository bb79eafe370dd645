"""The command line, in this process."""

from typing import Any

from click.testing import CliRunner, Result

from meshscope.cli import main


def invoke(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **options)
