"""Several runs as a Markdown page for a repository, with its pictures beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longfocus import plots
from longfocus.evaluation.draw import figure
from longfocus.evaluation.record import Results
from longfocus.evaluation.sections import TITLE, Section, caption, command_of, grouped, models
from longfocus.evaluation.tables import markdown, side_by_side


def write_markdown(runs: Sequence[Results], to: Path, title: str = TITLE) -> list[Path]:
    """Write the page, and a picture for each task that has rows: `PAGE_TASK.png`.

    Returns:
        The pictures.

    Raises:
        ConfigError: matplotlib is missing.
        OSError: something cannot be written.
    """
    pictures = []
    parts = [f"# {title}", markdown(*models(runs), words=5)]
    for section in grouped(runs):
        parts.append(f"## {section.heading}\n*{section.runs[0].paper}*")
        parts += [f"**{warning}**" for warning in section.warnings]
        if section.shown:
            path = to.with_name(f"{to.stem}_{'_'.join(section.heading.lower().split())}.png")
            plots.save(figure(section.shown), path)
            pictures.append(path)
            parts += [_tables(section), f"![{section.heading}]({path.name})"]
        parts += [_not_measured(run) for run in section.runs if run.refused]
        commands = "\n".join(f"{command_of(run)}   # {run.model}, {run.about.get('date', '')}" for run in section.runs)
        parts.append(f"```\n{commands}\n```")
    to.write_text("\n\n".join(parts) + "\n", "utf-8")
    return pictures


def _tables(section: Section) -> str:
    words = len(section.runs[0].axes)
    tables = []
    for measure in (section.runs[0].measures[0], *section.further):
        tables.append(f"{caption(measure)}:\n\n" + markdown(*side_by_side(section.shown, measure), words=words))
    return "\n\n".join(tables)


def _not_measured(run: Results) -> str:
    return "\n".join(f"* {run.model}, not measured: {point}: {why}" for point, why in run.refused.items())
