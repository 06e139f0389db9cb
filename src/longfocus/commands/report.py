"""`longfocus report`: several evaluations side by side on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longfocus.commands.output import note
from longfocus.errors import EvaluationError

EPILOG = """Examples:

  longfocus report eval/default eval/default-base

  longfocus report eval --to results.html --title "Before and after"

  longfocus report eval --to results.md      # for a repository: tables, commands, pictures beside it
"""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that longfocus eval wrote.")],
    to: Annotated[
        Path, typer.Option("--to", metavar="FILE", help="The page to write: HTML, or Markdown if it ends in .md.")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option("--title", metavar="TEXT", help="Its heading.")] = "Does it use its context?",
) -> None:
    """Put evaluations side by side: one HTML page with tables and plots that opens without a network."""
    from longfocus.evaluation.report import page
    from longfocus.evaluation.report_markdown import write_markdown
    from longfocus.evaluation.sections import find_runs

    found = find_runs(runs)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.suffix.lower() == ".md":
            write_markdown(found, to, title)
        else:
            to.write_text(page(found, title), "utf-8")
    except OSError as error:
        raise EvaluationError(f"{to} cannot be written: {error.strerror or error}.") from error
    models = len({run.model for run in found})
    note(f"{len(found)} results of {models} model" + "s" * (models != 1) + f": {to}")
