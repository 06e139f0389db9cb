"""The files of one task's run, in a folder of its own (docs/formats.md):

run.json         task, options, subject: what the samples depend on; written first, compared when it goes on
samples.jsonl    one line a sample, appended and flushed as they come
results.json     everything above, and the rows; written after each point
table.md         the rows for people; plot.png is drawn at the end
lock             held by the process that measures
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import filelock

from longfocus.errors import EvaluationError
from longfocus.files import write_whole
from longfocus.tasks.contract import Measure, Row, Sample
from longfocus.tasks.statistics import Estimate

RUN, SAMPLES, RESULTS, TABLE, PLOT = "run.json", "samples.jsonl", "results.json", "table.md", "plot.png"
LOCK = "lock"
FORMAT = 1


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
        except (ValueError, RecursionError) as error:
            raise EvaluationError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise EvaluationError(f"{path} is not a results file of this version (format {FORMAT}).")
        try:
            data["measures"] = [Measure(**measure) for measure in data["measures"]]
            data["rows"] = [_row(row) for row in data["rows"]]
            return cls(**data)
        except (KeyError, TypeError, AttributeError) as error:
            raise EvaluationError(f"{path} is damaged: {type(error).__name__}: {error}") from error


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
    """The folder of one task's run, while it runs; a context manager."""

    def __init__(self, folder: Path, results: Results, *, fresh: bool) -> None:
        """Begin, or go on where an earlier run with the same task, options and subject stopped.

        Args:
            fresh: remove an earlier run.

        Raises:
            EvaluationError: the folder holds another run, another process measures into it, or it cannot be written.
        """
        self.folder, self.results = folder, results
        self.samples: list[Sample] = []
        self.added = 0
        """Samples of this sitting."""
        self.earlier: Results | None = None
        """What earlier sittings came to."""
        self._lock = filelock.FileLock(folder / LOCK)
        identity = {"format": FORMAT, "task": results.task, "options": results.options, "subject": results.subject}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
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
            # what UTF-8 cannot hold becomes an escape, which JSON reads back
            self._file = (folder / SAMPLES).open("a", encoding="utf-8", errors="backslashreplace", newline="\n")
        except filelock.Timeout:
            raise EvaluationError(
                f"{folder}: another process is measuring into it; wait for it, or choose another --out."
            ) from None
        except (OSError, ValueError) as error:
            self._lock.release()
            said = error.strerror or error if isinstance(error, OSError) else error
            raise EvaluationError(f"{folder}: {said}; choose another --out, or --fresh to begin anew.") from error
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _go_on(self, known: Any, identity: dict[str, Any]) -> None:
        wanted = json.loads(json.dumps(_without_nan(identity)))
        differing = [d for d in _differences(known, wanted) if not d.startswith("options.by_")]  # see TaskOptions
        if differing:
            raise EvaluationError(
                f"{self.folder} holds a run with other settings: {'; '.join(differing[:4])}"
                + ("; …" if len(differing) > 4 else "")
                + ". Choose another --out, or --fresh to begin anew."
            )
        path = self.folder / SAMPLES
        if not path.exists():
            return
        whole = path.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]  # a line that a kill tore is measured again
        if len(kept) != len(whole):
            with path.open("r+b") as file:
                file.truncate(len(kept))
        for number, line in enumerate(kept.split(b"\n")[:-1], 1):
            try:
                self.samples.append(_sample(line))
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                raise EvaluationError(f"{path}, line {number} is damaged: {error}; --fresh begins anew.") from error
        if (self.folder / RESULTS).exists():
            self.earlier = Results.read(self.folder)
            self.results.seconds = self.earlier.seconds

    def add(self, sample: Sample) -> None:
        """Keep a sample: in the file before the next one is measured.

        Raises:
            EvaluationError: the disk refused it.
        """
        line = json.dumps(_without_nan(asdict(sample)), ensure_ascii=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise EvaluationError(
                f"{self.folder / SAMPLES} cannot be written: {error.strerror or error}. The samples before are there, and "
                "the same command goes on."
            ) from error
        self.samples.append(_sample(line.encode("utf-8", "backslashreplace")))
        self.added += 1

    def save(self, table: str) -> None:
        """results.json and table.md as they stand now.

        Raises:
            EvaluationError: the disk refused them.
        """
        try:
            write_json(self.folder / RESULTS, self.results.to_dict())
            write_whole(self.folder / TABLE, table + "\n", errors="backslashreplace")
        except OSError as error:
            raise EvaluationError(f"{self.folder} cannot be written: {error.strerror or error}.") from error

    def close(self) -> None:
        """No more samples."""
        with contextlib.suppress(OSError):  # what the disk refused was said already
            self._file.close()
        self._lock.release()


def _sample(line: bytes) -> Sample:
    """A line of samples.jsonl; null scores are nan."""
    data = json.loads(line)
    data["scores"] = {name: math.nan if score is None else score for name, score in data["scores"].items()}
    return Sample(**data)


def _differences(known: Any, wanted: Any, place: str = "") -> Iterator[str]:
    """What differs, as `options.samples (8 there, 50 now)`."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        for name in {**known, **wanted}:
            yield from _differences(known.get(name), wanted.get(name), f"{place}.{name}" if place else name)
    elif known != wanted:
        yield f"{place or 'all of it'} ({_short(known)} there, {_short(wanted)} now)"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def write_json(path: Path, data: Any) -> None:
    """JSON for people and programs; nan is null."""
    write_whole(path, json.dumps(_without_nan(data), indent=1, ensure_ascii=False) + "\n", errors="backslashreplace")
