"""The files of one task's run, in a folder of its own (docs/formats.md):

run.json         task, options, subject: what the samples depend on; written first, compared when it goes on
samples.jsonl    one line a sample, appended and flushed as they come
results.json     everything above, and the rows
table.md, plot.png
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longfocus.errors import EvaluationError
from longfocus.tasks.contract import Measure, Row, Sample
from longfocus.tasks.statistics import Estimate

RUN, SAMPLES, RESULTS, TABLE, PLOT = "run.json", "samples.jsonl", "results.json", "table.md", "plot.png"
FORMAT = 1
_NOT_COMPARED = ("command", "date", "threads", "machine")


@dataclass
class Results:
    """What results.json holds."""

    task: str
    title: str
    paper: str
    axes: list[str]
    heat: bool
    log_x: bool
    measures: list[Measure]
    options: dict[str, Any]
    subject: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Points that the model cannot take -> why."""
    stopped: bool = False
    """Not all samples are there; the same command goes on."""
    seconds: float = 0.0
    """Of measuring, all sittings together."""
    about: dict[str, Any] = field(default_factory=dict)
    """Command, machine, versions, date."""

    @property
    def model(self) -> str:
        """The subject's name."""
        return str(self.subject.get("name", "?"))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; nan is null."""
        plain = {"format": FORMAT, **asdict(self)}
        cleaned: dict[str, Any] = _without_nan(plain)
        return cleaned

    @classmethod
    def read(cls, folder: Path) -> Results:
        """
        Raises:
            EvaluationError: no results there, or not of this format.
        """
        path = folder / RESULTS
        try:
            data = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise EvaluationError(f"{path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise EvaluationError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise EvaluationError(f"{path} is not a results file of this version (format {FORMAT}).")
        try:
            data["measures"] = [Measure(**measure) for measure in data["measures"]]
            data["rows"] = [_row(row) for row in data["rows"]]
            return cls(**data)
        except (KeyError, TypeError) as error:
            raise EvaluationError(f"{path} is damaged: {error}") from error


def _row(data: Mapping[str, Any]) -> Row:
    estimates = {
        name: Estimate(*(math.nan if value is None else value for value in (e["value"], e["low"], e["high"])))
        for name, e in data["estimates"].items()
    }
    return Row(data["values"], data["samples"], estimates, data["chance"], data["notes"])


def _without_nan(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _without_nan(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_without_nan(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


class Recorder:
    """The folder of one task's run, while it runs."""

    def __init__(self, folder: Path, results: Results, *, fresh: bool) -> None:
        """Begin, or go on where an earlier run with the same task, options and subject stopped.

        Args:
            fresh: remove an earlier run.

        Raises:
            EvaluationError: the folder holds another run, or cannot be written.
        """
        self.folder, self.results = folder, results
        self.samples: list[Sample] = []
        identity = {"format": FORMAT, "task": results.task, "options": results.options, "subject": results.subject}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run = folder / RUN
            if fresh:
                for name in (SAMPLES, RESULTS, TABLE, PLOT, RUN):
                    (folder / name).unlink(missing_ok=True)
            if run.exists():
                self._go_on(json.loads(run.read_text("utf-8")), identity)
            elif (folder / SAMPLES).exists():
                raise EvaluationError(f"{folder} holds samples of an unknown run; choose another --out, or --fresh.")
            else:
                write_json(run, identity)
            self._file = (folder / SAMPLES).open("a", encoding="utf-8")
        except (OSError, ValueError) as error:
            if isinstance(error, EvaluationError):
                raise
            raise EvaluationError(f"{folder}: {error}; choose another --out, or --fresh to begin anew.") from error

    def _go_on(self, known: dict[str, Any], identity: dict[str, Any]) -> None:
        wanted = json.loads(json.dumps(_without_nan(identity)))
        differing = [
            f"{part}.{name}" if isinstance(wanted[part], dict) else part
            for part in wanted
            for name in (_keys(known.get(part), wanted[part]) if isinstance(wanted[part], dict) else [""])
            if (_get(known.get(part), name) if name else known.get(part))
            != (wanted[part].get(name) if name else wanted[part])
        ]
        if differing:
            raise EvaluationError(
                f"{self.folder} holds a run with other settings ({', '.join(differing[:4])}); choose another --out, or "
                "--fresh to begin anew."
            )
        path = self.folder / SAMPLES
        if not path.exists():
            return
        whole = path.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]  # a line that a kill tore is measured again
        if len(kept) != len(whole):
            with path.open("r+b") as file:
                file.truncate(len(kept))
        for number, line in enumerate(kept.decode("utf-8").splitlines(), 1):
            try:
                self.samples.append(Sample(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise EvaluationError(f"{path}, line {number}: {error}; --fresh begins anew.") from error
        if (self.folder / RESULTS).exists():
            self.results.seconds = Results.read(self.folder).seconds

    def add(self, sample: Sample) -> None:
        """Keep a sample: on disk before the next one is measured."""
        line = json.dumps(_without_nan(asdict(sample)), ensure_ascii=False)
        self._file.write(line + "\n")
        self._file.flush()
        self.samples.append(Sample(**json.loads(line)))

    def save(self) -> None:
        """results.json as it stands now."""
        write_json(self.folder / RESULTS, self.results.to_dict())

    def close(self) -> None:
        """No more samples."""
        self._file.close()


def _keys(known: Any, wanted: dict[str, Any]) -> list[str]:
    both = {**(known if isinstance(known, dict) else {}), **wanted}
    return [name for name in both if name not in _NOT_COMPARED]


def _get(known: Any, name: str) -> Any:
    return known.get(name) if isinstance(known, dict) else None


def write_json(path: Path, data: Any) -> None:
    """Whole or not at all: a kill leaves the file as it was."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(_without_nan(data), indent=1, ensure_ascii=False) + "\n", "utf-8")
    os.replace(new, path)
