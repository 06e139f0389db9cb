"""Several runs on one HTML page that opens without a network: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from longfocus import plots
from longfocus.errors import ConfigError, EvaluationError
from longfocus.evaluation.draw import figure
from longfocus.evaluation.record import RESULTS, Results
from longfocus.evaluation.tables import header_and_rows, side_by_side
from longfocus.tasks import TASKS
from longfocus.tasks.contract import Measure

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --fade: #777; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; font-size: .92rem; }
.wide { overflow-x: auto; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
th { background: var(--soft); vertical-align: bottom; }
th.word, td.word { text-align: left; }
img { max-width: 100%; background: white; border-radius: 4px; }
.paper, .small { color: var(--fade); font-size: .9rem; }
code { overflow-wrap: anywhere; } nav a { margin-right: 1rem; } summary { cursor: pointer; }
.warn { border-left: 4px solid #c80; padding-left: .8rem; }
"""


def find_runs(folders: Sequence[Path]) -> list[Results]:
    """The results in folders of runs, or of several runs (`longfocus eval --out` of more than one task or model).

    Raises:
        EvaluationError: a folder holds none, or a file is damaged.
    """
    found: dict[Path, Results] = {}
    for folder in folders:
        if not folder.exists():
            raise EvaluationError(f"{folder} does not exist; give the --out folders of longfocus eval.")
        paths = sorted(folder.rglob(RESULTS)) if folder.is_dir() else [folder] if folder.name == RESULTS else []
        if not paths:
            raise EvaluationError(f"{folder} holds no {RESULTS}; give the --out folders of longfocus eval.")
        for path in paths:
            if path.resolve() not in found:
                found[path.resolve()] = Results.read(path.parent)
    return list(found.values())


def page(runs: Sequence[Results], title: str = "Does it use its context?") -> str:
    """The page: for each task the models side by side, a plot, and all numbers with the command that made them."""
    groups: dict[tuple[str, ...], list[Results]] = {}
    labels = _labels(runs)
    for run in runs:
        named = dataclasses.replace(run, subject={**run.subject, "name": labels[_identity(run)]})
        groups.setdefault((run.task, *run.axes), []).append(named)
    order = {task: number for number, task in enumerate(TASKS)}
    sections = sorted(groups.values(), key=lambda found: order.get(found[0].task, len(order)))
    heads = [_heading(found[0], [other[0] for other in sections]) for found in sections]
    parts = [f"<h1>{html.escape(title)}</h1>", _models(runs, labels), "<nav>"]
    parts += [f'<a href="#section-{number}">{html.escape(head)}</a>' for number, head in enumerate(heads)]
    parts.append("</nav>")
    for number, (head, found) in enumerate(zip(heads, sections, strict=True)):
        parts.append(f'<h2 id="section-{number}">{html.escape(head)}</h2>')
        parts.append(_section(_apart(found)))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _identity(run: Results) -> str:
    return json.dumps(run.subject, sort_keys=True)


def _labels(runs: Sequence[Results]) -> dict[str, str]:
    """Subject -> name; different models with one name get numbers, the same on all of the page."""
    labels: dict[str, str] = {}
    for run in runs:
        if _identity(run) not in labels:
            name, number = run.model, 2
            while name in labels.values():
                name, number = f"{run.model} ({number})", number + 1
            labels[_identity(run)] = name
    return labels


def _apart(runs: Sequence[Results]) -> list[Results]:
    """Several runs of one model on one task get numbers."""
    seen: dict[str, int] = {}
    found = []
    for run in runs:
        seen[run.model] = seen.get(run.model, 0) + 1
        again = f"{run.model}, run {seen[run.model]}" if seen[run.model] > 1 else run.model
        found.append(dataclasses.replace(run, subject={**run.subject, "name": again}))
    return found


def _heading(run: Results, firsts: Sequence[Results]) -> str:
    """A task's title, with its axes where it was run over others too."""
    if sum(other.task == run.task for other in firsts) > 1:
        return f"{run.title} by {', '.join(run.axes)}"
    return run.title


def _models(runs: Sequence[Results], labels: dict[str, str]) -> str:
    rows = []
    for identity, label in labels.items():
        about = json.loads(identity)
        focus = about.get("focus") or {}
        memory = ""
        if focus:
            layers = ", ".join(map(str, focus.get("memory_layers") or []))
            span = f"; read span {focus['read_span']:,}" if focus.get("read_span") is not None else ""
            memory = f"layers {layers}; window {focus.get('window')}; {focus.get('retrieval')}{span}"
        parameters = about.get("parameters")
        size = f"{parameters / 1e6:,.0f}M" if parameters else ""
        rows.append([label, str(about.get("kind", "")), size, str(about.get("dtype", "")), memory])
    return _table(["model", "kind", "parameters", "dtype", "memory"], rows, words=5)


def _section(runs: Sequence[Results]) -> str:
    first = runs[0]
    parts = [f'<p class="paper">{html.escape(first.paper)}</p>']
    stopped = [run.model for run in runs if run.stopped]
    if stopped:
        parts.append(f'<p class="warn">Not finished: {html.escape(", ".join(stopped))}.</p>')
    if len({json.dumps(run.options, sort_keys=True) for run in runs}) > 1:
        parts.append('<p class="warn">These runs were made with different options (below): compare with care.</p>')
    shown = [run for run in runs if run.rows]
    if shown:
        parts.append(_compared(shown, first.measures[0]))
        try:
            picture = base64.b64encode(plots.png(figure(shown), dpi=110)).decode("ascii")
            parts.append(f'<img alt="{html.escape(first.title)}" src="data:image/png;base64,{picture}">')
        except ConfigError as error:  # no matplotlib
            parts.append(f'<p class="small">{html.escape(str(error))}</p>')
        for measure in first.measures[1:]:
            if any(measure.name in row.estimates for run in shown for row in run.rows):
                parts.append(
                    f"<details><summary>{html.escape(measure.name)}</summary>{_compared(shown, measure)}</details>"
                )
    for run in runs:
        parts.append(_details(run))
    return "\n".join(parts)


def _compared(runs: Sequence[Results], measure: Measure) -> str:
    header, rows = side_by_side(runs, measure)
    better = {"higher": "; higher is better", "lower": "; lower is better", "neither": ""}[measure.better]
    unit = f", {measure.unit}" if measure.unit else ""
    return f'<p class="small">{html.escape(measure.name + unit + better)}; in brackets the 95% interval</p>' + _table(
        header, rows, words=len(runs[0].axes)
    )


def _details(run: Results) -> str:
    header, rows = header_and_rows(run)
    command = shlex.join(map(str, run.about.get("command") or []))
    refused = "".join(f"<li>{html.escape(point)}: {html.escape(why)}</li>" for point, why in run.refused.items())
    told = {name: value for name, value in run.about.items() if name != "command"}
    return (
        f"<details><summary>{html.escape(run.model)}: all numbers, options, command</summary>"
        + _table(header, rows, words=len(run.axes))
        + (f"<p>Not measured:</p><ul>{refused}</ul>" if refused else "")
        + f'<p class="small"><code>{html.escape(command)}</code></p>'
        + f'<p class="small">options <code>{html.escape(_plain(run.options))}</code></p>'
        + f'<p class="small">model <code>{html.escape(_plain(run.subject))}</code></p>'
        + f'<p class="small">{run.seconds:,.0f} s of measuring; <code>{html.escape(_plain(told))}</code></p></details>'
    )


def _plain(data: object) -> str:
    return json.dumps(data, ensure_ascii=False)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="word"' if number < words else "" for number in range(len(cells))]
        return (
            "<tr>" + "".join(f"<{tag}{k}>{html.escape(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True)) + "</tr>"
        )

    body = "\n".join(line("td", row) for row in rows)
    return f'<div class="wide"><table>\n<thead>{line("th", header)}</thead>\n<tbody>{body}</tbody></table></div>'
