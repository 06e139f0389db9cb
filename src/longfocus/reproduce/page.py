"""The files of an experiment: results.json for programs, figure.png, and page.md with the paper beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from longfocus import plots
from longfocus.errors import ConfigError
from longfocus.evaluation.record import write_json
from longfocus.evaluation.tables import markdown, number, share
from longfocus.files import write_whole
from longfocus.plots import Series, short_number
from longfocus.reproduce.claims import Verdict, by_seed
from longfocus.reproduce.experiment import Line, Told
from longfocus.reproduce.report import Report

RESULTS, FIGURE, PAGE = "results.json", "figure.png", "page.md"
FORMAT = 1


def write(report: Report) -> None:
    """Write all files into the report's folder.

    Raises:
        OSError: the disk refused them.
    """
    verdicts = judge(report)
    drawn = False
    try:
        plots.save(figure(report), report.folder / FIGURE)
        drawn = True
    except ConfigError:
        pass  # without matplotlib there is a table
    write_json(report.folder / RESULTS, as_data(report, verdicts))
    write_whole(report.folder / PAGE, page(report, verdicts, drawn=drawn))


def judge(report: Report) -> list[tuple[str, Verdict]]:
    """(claim, what it came to)."""
    show = _shower(report)
    return [(claim.text, claim.check(report.numbers, show)) for claim in report.experiment.claims]


def as_data(report: Report, verdicts: Sequence[tuple[str, Verdict]]) -> dict[str, Any]:
    """What results.json holds."""
    experiment = report.experiment
    return {
        "format": FORMAT,
        "experiment": experiment.name,
        "paper": experiment.paper,
        "scale": report.scale_name,
        "about": report.scale.about,
        "seeds": report.seeds,
        "measure": experiment.measure,
        "axis": experiment.axis,
        "stopped": report.stopped,
        "numbers": [asdict(found) for found in report.numbers],
        "published": {
            "where": experiment.published.where,
            "lines": {
                line: [{"x": x, "value": told.value, "how": told.how} for x, told in points.items()]
                for line, points in experiment.published.lines.items()
            },
        },
        "claims": [{"claim": text, **asdict(verdict)} for text, verdict in verdicts],
        "trained": [asdict(trained) for trained in report.trained],
        "refused": report.refused,
        "command": report.command,
        "date": report.date,
    }


def figure(report: Report) -> Any:
    """The paper's lines beside ours, group by group; bars reach from the least to the largest seed."""
    experiment = report.experiment
    panels: dict[str, list[Series]] = {}
    for group, lines in _groups(report).items():
        ours, theirs = [], []
        for line in lines:
            xs = sorted({n.x for n in report.numbers if n.line == line.name})
            values = [list(by_seed(report.numbers, line.name, x).values()) for x in xs]
            known = [(x, found) for x, found in zip(xs, values, strict=True) if found]
            if known:
                ours.append(
                    Series(
                        line.title,
                        [x for x, _ in known],
                        [math.fsum(found) / len(found) for _, found in known],
                        [min(found) for _, found in known],
                        [max(found) for _, found in known],
                    )
                )
            points = experiment.published.lines.get(line.name, {})
            if points:
                nothing = [math.nan] * len(points)
                theirs.append(Series(line.title, list(points), [t.value for t in points.values()], nothing, nothing))
        name = f"{group}: " if group else ""
        if theirs:
            panels[f"{name}paper, {experiment.published.where}"] = theirs
        if ours or not theirs:
            panels[f"{name}measured, {report.scale_name}"] = ours
    return plots.lines(
        panels,
        title=experiment.title,
        x_label=experiment.axis_title,
        y_label=experiment.measure,
        share=experiment.share,
    )


def _groups(report: Report) -> dict[str, list[Line]]:
    """Group -> its lines; one without a name where there are none."""
    found: dict[str, list[Line]] = {}
    for line in report.scale.lines:
        found.setdefault(line.group, []).append(line)
    return found


def page(report: Report, verdicts: Sequence[tuple[str, Verdict]], *, drawn: bool) -> str:
    """The page, as Markdown."""
    experiment, scale = report.experiment, report.scale
    parts = [
        f"# {experiment.title}",
        f"{_source(report)} Scale **{report.scale_name}**: {scale.about}. "
        f"{report.seeds} seed{'s' * (report.seeds != 1)}. {report.date}.",
        f"    {' '.join(report.command)}",
    ]
    if report.stopped:
        parts.append("**Not finished**: some of it is missing; the same command goes on.")
    if drawn:
        beside = ", the paper beside this run" if experiment.published.lines else ""
        parts.append(f"![{experiment.measure} against {experiment.axis_title}{beside}]({FIGURE})")
    parts.append(f"## {experiment.measure}")
    for group, lines in _groups(report).items():
        parts += [f"### {group}", _numbers(report, lines)] if group else [_numbers(report, lines)]
    if experiment.published.note:
        parts.append(f"Paper: {experiment.published.note}")
    parts.append("Measured: the mean of the seeds, and the least and the largest in brackets.")
    rows = [[text, verdict.outcome, verdict.detail] for text, verdict in verdicts]
    parts += ["## Claims", markdown(["claim", "", "95% interval over seeds"], rows, words=3)]
    parts += ["## Training", _training(report)]
    if scale.departures:
        parts.append("## What differs from the paper\n\n" + "\n".join(f"* {text}" for text in scale.departures))
    if report.refused:
        rows = [[name, why] for name, why in report.refused.items()]
        parts += ["## Not measured", markdown(["what", "why"], rows, words=2)]
    return "\n\n".join(parts) + "\n"


def _source(report: Report) -> str:
    paper = report.experiment.paper
    return (
        f"Focused Transformer, arXiv 2307.03170, {paper}." if paper else "Not in the paper; trained as its models were."
    )


def _numbers(report: Report, lines: Sequence[Line]) -> str:
    """A row for each x; for each line ours, and before it the paper's number where there is one at some x."""
    show = _shower(report)
    published = {line.name: report.experiment.published.lines.get(line.name, {}) for line in lines}
    xs = {n.x for n in report.numbers if n.line in published} | {x for points in published.values() for x in points}
    told = any(published.values())
    header = [report.experiment.axis_title]
    for line in lines:
        header += [f"{line.title}: paper", "measured"] if told else [line.title]
    rows = []
    for x in sorted(xs):
        row = [short_number(x)]
        for line in lines:
            found = list(by_seed(report.numbers, line.name, x).values())
            row += [_told(published[line.name].get(x), show)] * told + [_span(found, show)]
        rows.append(row)
    return markdown(header, rows)


def _training(report: Report) -> str:
    rows = [
        [
            trained.model,
            str(trained.seed),
            f"{trained.steps:,}",
            f"{trained.tokens:,}",
            "" if trained.loss is None else number(trained.loss),
            "" if trained.accuracy is None else share(trained.accuracy),
        ]
        for trained in report.trained
    ]
    return markdown(["model", "seed", "steps", "predicted tokens", "last loss", "last accuracy"], rows)


def _shower(report: Report) -> Any:
    return share if report.experiment.share else number


def _told(told: Told | None, show: Any) -> str:
    return "" if told is None else f"{told.how} {show(told.value)}".strip()


def _span(found: Sequence[float], show: Any) -> str:
    if not found:
        return ""
    mean = show(math.fsum(found) / len(found))
    return mean if len(found) == 1 else f"{mean} [{show(min(found))}, {show(max(found))}]"
