"""Several runs on one HTML page that opens without a network: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path

from longfocus import plots
from longfocus.errors import ConfigError, EvaluationError
from longfocus.evaluation.draw import figure
from longfocus.evaluation.record import RESULTS, Results
from longfocus.evaluation.tables import header_and_rows, side_by_side

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
    found = []
    for folder in folders:
        paths = sorted(folder.rglob(RESULTS)) if folder.is_dir() else [folder] if folder.name == RESULTS else []
        if not paths:
            raise EvaluationError(f"{folder} holds no {RESULTS}; give the --out folders of longfocus eval.")
        found += [Results.read(path.parent) for path in paths]
    return found


def page(runs: Sequence[Results], title: str = "Does it use its context?") -> str:
    """The page: for each task the models side by side, a plot, and all numbers with the command that made them."""
    tasks: dict[str, list[Results]] = {}
    for run in _named_apart(runs):
        tasks.setdefault(run.task, []).append(run)
    parts = [f"<h1>{html.escape(title)}</h1>", _models(runs), "<nav>"]
    parts += [f'<a href="#{html.escape(task)}">{html.escape(found[0].title)}</a>' for task, found in tasks.items()]
    parts.append("</nav>")
    for task, found in tasks.items():
        parts.append(_section(task, found))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _named_apart(runs: Sequence[Results]) -> list[Results]:
    """Runs whose models have one name get numbers."""
    seen: dict[tuple[str, str], int] = {}
    for run in runs:
        key = (run.task, run.model)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 1:
            run.subject["name"] = f"{run.model} ({seen[key]})"
    return list(runs)


def _models(runs: Sequence[Results]) -> str:
    rows = []
    for about in {json.dumps(run.subject, sort_keys=True): run.subject for run in runs}.values():
        focus = about.get("focus") or {}
        memory = ""
        if focus:
            memory = f"layers {', '.join(map(str, focus.get('memory_layers') or []))}; window {focus.get('window')}; {focus.get('retrieval')}"
        parameters = about.get("parameters")
        size = f"{parameters / 1e6:,.0f}M" if parameters else ""
        rows.append([str(about.get("name")), str(about.get("kind")), size, str(about.get("dtype", "")), memory])
    return _table(["model", "kind", "parameters", "dtype", "memory"], rows, words=5)


def _section(task: str, runs: Sequence[Results]) -> str:
    first = runs[0]
    parts = [f'<h2 id="{html.escape(task)}">{html.escape(first.title)}</h2>']
    parts.append(f'<p class="paper">{html.escape(first.paper)}</p>')
    stopped = [run.model for run in runs if run.stopped]
    if stopped:
        parts.append(f'<p class="warn">Stopped before its end: {html.escape(", ".join(stopped))}.</p>')
    if len({json.dumps(run.options, sort_keys=True) for run in runs}) > 1:
        parts.append('<p class="warn">These runs were made with different options (below): compare with care.</p>')
    shown = [run for run in runs if run.rows]
    if shown:
        header, rows = side_by_side(shown)
        better = {"higher": "higher is better", "lower": "lower is better", "neither": ""}[first.measures[0].better]
        parts.append(
            f'<p class="small">{html.escape(first.measures[0].name)}'
            + (f", {better}" if better else "")
            + "; in brackets the 95% interval</p>"
        )
        parts.append(_table(header, rows, words=len(first.axes)))
        try:
            parts.append(f'<img alt="{html.escape(first.title)}" src="data:image/png;base64,{_png(shown)}">')
        except ConfigError as error:  # no matplotlib
            parts.append(f'<p class="small">{html.escape(str(error))}</p>')
    for run in runs:
        parts.append(_details(run))
    return "\n".join(parts)


def _details(run: Results) -> str:
    header, rows = header_and_rows(run)
    command = " ".join(run.about.get("command", []))
    refused = "".join(f"<li>{html.escape(point)}: {html.escape(why)}</li>" for point, why in run.refused.items())
    return (
        f"<details><summary>{html.escape(run.model)}: all numbers, options, command</summary>"
        + _table(header, rows, words=len(run.axes))
        + (f"<p>Not measured:</p><ul>{refused}</ul>" if refused else "")
        + f'<p class="small"><code>{html.escape(command)}</code></p>'
        + f'<p class="small">options <code>{html.escape(json.dumps(run.options))}</code></p>'
        + f'<p class="small">model <code>{html.escape(json.dumps(run.subject))}</code></p>'
        + f'<p class="small">{run.seconds:,.0f} s; {html.escape(json.dumps(run.about))}</p></details>'
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="word"' if number < words else "" for number in range(len(cells))]
        return (
            "<tr>" + "".join(f"<{tag}{k}>{html.escape(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True)) + "</tr>"
        )

    body = "\n".join(line("td", row) for row in rows)
    return f'<div class="wide"><table>\n<thead>{line("th", header)}</thead>\n<tbody>{body}</tbody></table></div>'


def _png(runs: Sequence[Results]) -> str:
    made = figure(runs)
    buffer = io.BytesIO()
    made.savefig(buffer, format="png", dpi=110)
    plots.pyplot().close(made)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
