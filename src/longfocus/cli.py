"""The command line. Importing this loads no torch; each command imports what it needs when it runs."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import typer

from longfocus.commands import COMMANDS
from longfocus.errors import LongfocusError

EPILOG = """Examples:

  longfocus ask book.txt "Who is the narrator?"

  longfocus remember src/ docs/ manual.pdf --into project.memory

  longfocus ask project.memory "Where are retries configured?"

  longfocus chat project.memory
"""

app = typer.Typer(
    name="longfocus",
    help="Ask whole books and repositories on your own machine: memory attention for pretrained decoder models.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from longfocus import __version__

        typer.echo(f"longfocus {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Options that stand before the command."""


for _name, _target in COMMANDS.items():
    _module, _function = _target.split(":")
    _found = import_module(_module)
    app.command(_name, epilog=_found.EPILOG, context_settings=getattr(_found, "CONTEXT", None))(
        getattr(_found, _function)
    )


def main() -> None:
    """Run the command line; errors meant for the user become one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names and answers that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except LongfocusError as error:
        print(f"longfocus: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("longfocus: stopped.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # a reader such as `head` has left
        sys.exit(141)


if __name__ == "__main__":
    main()
