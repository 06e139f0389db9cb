"""Several runs on one HTML page that opens without a network: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence

from longfocus import plots
from longfocus.errors import ConfigError
from longfocus.evaluation.draw import figure
from longfocus.evaluation.record import Results
from longfocus.evaluation.sections import TITLE, Section, caption, command_of, grouped, models
from longfocus.evaluation.tables import header_and_rows, side_by_side
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


def page(runs: Sequence[Results], title: str = TITLE) -> str:
    """The page: for each task the models side by side, a plot, and all numbers with the command that made them."""
    sections = grouped(runs)
    parts = [f"<h1>{html.escape(title)}</h1>", _table(*models(runs), words=5), "<nav>"]
    parts += [f'<a href="#section-{n}">{html.escape(section.heading)}</a>' for n, section in enumerate(sections)]
    parts.append("</nav>")
    for number, section in enumerate(sections):
        parts.append(f'<h2 id="section-{number}">{html.escape(section.heading)}</h2>')
        parts.append(_section(section))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _section(section: Section) -> str:
    first = section.runs[0]
    parts = [f'<p class="paper">{html.escape(first.paper)}</p>']
    parts += [f'<p class="warn">{html.escape(warning)}</p>' for warning in section.warnings]
    if section.shown:
        parts.append(_compared(section.shown, first.measures[0]))
        try:
            picture = base64.b64encode(plots.png(figure(section.shown), dpi=110)).decode("ascii")
            parts.append(f'<img alt="{html.escape(first.title)}" src="data:image/png;base64,{picture}">')
        except ConfigError as error:  # no matplotlib
            parts.append(f'<p class="small">{html.escape(str(error))}</p>')
        for measure in section.further:
            told = html.escape(measure.name)
            parts.append(f"<details><summary>{told}</summary>{_compared(section.shown, measure)}</details>")
    return "\n".join(parts + [_details(run) for run in section.runs])


def _compared(runs: Sequence[Results], measure: Measure) -> str:
    header, rows = side_by_side(runs, measure)
    return f'<p class="small">{html.escape(caption(measure))}</p>' + _table(header, rows, words=len(runs[0].axes))


def _details(run: Results) -> str:
    header, rows = header_and_rows(run)
    command = command_of(run)
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
