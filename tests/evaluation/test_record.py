"""The files of a run: written and read back equal, never half, never mixed.

python -m pytest tests/evaluation/test_record.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfocus.errors import EvaluationError
from longfocus.evaluation import record
from longfocus.evaluation.record import RESULTS, RUN, SAMPLES, Recorder, Results, write_json
from longfocus.tasks.contract import Measure, Row, Sample
from longfocus.tasks.statistics import Estimate
from tests.evaluation.made_up import results

# -- results.json ------------------------------------------------------------------------------------------

numbers = st.floats(allow_infinity=False, width=64)
words = st.text(max_size=12)
values = st.dictionaries(
    words, st.one_of(st.integers(-(2**60), 2**60), numbers.filter(math.isfinite), words), max_size=3
)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), numbers.filter(math.isfinite), words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=6,
)
estimates = st.builds(Estimate, numbers, numbers, numbers)
rows = st.builds(
    Row,
    values,
    st.integers(0, 1 << 40),
    st.dictionaries(words, estimates, max_size=3),
    st.dictionaries(words, numbers.filter(math.isfinite), max_size=2),
    st.dictionaries(words, plain, max_size=2),
)
measures = st.builds(
    Measure, words, st.sampled_from(["share", "number"]), st.sampled_from(["higher", "lower", "neither"]), words
)
any_results = st.builds(
    Results,
    task=words,
    title=words,
    paper=words,
    axes=st.lists(words, max_size=3),
    heat=st.booleans(),
    log_x=st.booleans(),
    measures=st.lists(measures, max_size=3),
    options=st.dictionaries(words, plain, max_size=3),
    subject=st.dictionaries(words, plain, max_size=3),
    rows=st.lists(rows, max_size=3),
    refused=st.dictionaries(words, words, max_size=2),
    stopped=st.booleans(),
    seconds=numbers.filter(math.isfinite),
    about=st.dictionaries(words, plain, max_size=3),
)


@given(any_results)
def test_results_read_back_equal(tmp_path_factory: pytest.TempPathFactory, made: Results) -> None:
    folder = tmp_path_factory.mktemp("run")
    write_json(folder / RESULTS, made.to_dict())
    text = (folder / RESULTS).read_text("utf-8")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert repr(Results.read(folder)) == repr(made)  # nan is not equal to itself, but is written alike


def test_what_is_no_number_is_null_and_comes_back_as_nan(tmp_path: Path) -> None:
    row = Row({"x": 1}, 3, {"right": Estimate(0.5, math.nan, math.inf)})
    write_json(tmp_path / RESULTS, replace(results(), rows=[row]).to_dict())
    assert json.loads((tmp_path / RESULTS).read_text())["rows"][0]["estimates"]["right"] == {
        "value": 0.5,
        "low": None,
        "high": None,
    }
    found = Results.read(tmp_path).rows[0].estimates["right"]
    assert found.value == 0.5 and math.isnan(found.low) and math.isnan(found.high)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("", "is not JSON"),
        ('{"format": 1, "task": "x"', "is not JSON"),
        ("[]", "not a results file of this version"),
        ("{}", "not a results file of this version"),
        ('{"format": 99}', "not a results file of this version"),
        ('{"format": 1}', "is damaged: KeyError: 'measures'"),
        ('{"format": 1, "measures": [], "rows": []}', "is damaged: TypeError"),
        ('{"format": 1, "measures": [7], "rows": []}', "is damaged: TypeError"),
        ('{"format": 1, "measures": [], "rows": [{"estimates": []}]}', "is damaged: AttributeError"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_damaged_results_are_refused_by_name(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / RESULTS).write_text(text)
    with pytest.raises(EvaluationError, match=r"results\.json") as caught:
        Results.read(tmp_path)
    assert message in str(caught.value)


# -- samples -----------------------------------------------------------------------------------------------


def begin(folder: Path, *, fresh: bool = False, **changes: Any) -> Recorder:
    return Recorder(folder, replace(results(), rows=[], **changes), fresh=fresh)


def sample(number: int, **changes: Any) -> Sample:
    given: dict[str, Any] = {"id": f"{number}", "values": {"tokens": 8192, "depth": 0.1}, "scores": {"right": 1.0}}
    return Sample(**{**given, **changes})


def test_samples_are_on_disk_at_once_and_come_back(tmp_path: Path) -> None:
    answers = [
        "plain",
        "zwei\nZeilen",
        "\u2028\u2029\x85\x0b\x0c\x1c end",
        "日本語 👍🏽",
        "half \ud83d pair",
        '"quoted\\"',
        "",
    ]
    with begin(tmp_path) as recorder:
        for number, answer in enumerate(answers):
            recorder.add(sample(number, details={"answer": answer, "places": [1, 2.5, None]}))
            assert (tmp_path / SAMPLES).read_bytes().count(b"\n") == number + 1
        kept = list(recorder.samples)
    for line in (tmp_path / SAMPLES).read_bytes().split(b"\n")[:-1]:
        line.decode("utf-8")
    with begin(tmp_path) as recorder:
        assert recorder.samples == kept
        assert [found.details["answer"] for found in recorder.samples] == answers


def test_a_score_that_is_no_number_stays_none(tmp_path: Path) -> None:
    with begin(tmp_path) as recorder:
        recorder.add(sample(1, scores={"right": math.nan, "loss": math.inf}))
        assert all(math.isnan(score) for score in recorder.samples[0].scores.values())
    json.loads((tmp_path / SAMPLES).read_text(), parse_constant=lambda name: pytest.fail(name))
    with begin(tmp_path) as recorder:
        assert all(math.isnan(score) for score in recorder.samples[0].scores.values())


@pytest.mark.parametrize("torn", [b'{"id": "2", "val', b"{", b"\xe6\x97", b'{"id": "2"}'])
def test_a_torn_last_line_is_measured_again(tmp_path: Path, torn: bytes) -> None:
    with begin(tmp_path) as recorder:
        recorder.add(sample(0))
        recorder.add(sample(1))
    whole = (tmp_path / SAMPLES).read_bytes()
    (tmp_path / SAMPLES).write_bytes(whole + torn)
    with begin(tmp_path) as recorder:
        assert [found.id for found in recorder.samples] == ["0", "1"]
        recorder.add(sample(2))
    assert (tmp_path / SAMPLES).read_bytes().startswith(whole + b'{"id": "2", "values"')
    with begin(tmp_path) as recorder:
        assert [found.id for found in recorder.samples] == ["0", "1", "2"]


@pytest.mark.parametrize("line", ["nonsense", "[]", "7", '{"id": "1"}', '{"id": "1", "scores": 7, "values": {}}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    with begin(tmp_path) as recorder:
        recorder.add(sample(0))
    with (tmp_path / SAMPLES).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(EvaluationError, match=r"samples\.jsonl, line 2 is damaged: .*--fresh"):
        begin(tmp_path)
    begin(tmp_path, fresh=True).close()


# -- which run a folder holds ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "dictionary"}, 'task ("passkey" there, "dictionary" now)'),
        ({"options": {"seed": 1}}, "options.seed (0 there, 1 now)"),
        ({"options": {"seed": 0, "lengths": [2048]}}, "options.lengths (null there, [2048] now)"),
        ({"subject": {"name": "other", "kind": "focused"}}, 'subject.name ("default" there, "other" now)'),
        (
            {"subject": {"name": "default", "kind": "focused", "parameters": 134515008, "focus": {"window": 8}}},
            'subject.focus (null there, {"window": 8} now)',
        ),
    ],
)
def test_other_settings_are_refused_by_name_and_value(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with begin(tmp_path) as recorder:
        recorder.add(sample(0))
    before = (tmp_path / SAMPLES).read_bytes()
    with pytest.raises(EvaluationError, match="Choose another --out") as caught:
        begin(tmp_path, **changes)
    assert words in str(caught.value)
    assert (tmp_path / SAMPLES).read_bytes() == before
    with begin(tmp_path, fresh=True, **changes) as recorder:
        assert recorder.samples == []
    with begin(tmp_path, **changes):
        pass


def test_deep_differences_are_found(tmp_path: Path) -> None:
    subject = {"name": "a", "focus": {"window": 256, "read_span": None, "memory_layers": [6, 17]}}
    begin(tmp_path, subject=subject).close()
    other = {"name": "a", "focus": {"window": 512, "read_span": 8192, "memory_layers": [6, 18]}}
    with pytest.raises(EvaluationError) as caught:
        begin(tmp_path, subject=other)
    for words in ("focus.window (256 there, 512 now)", "focus.read_span (null there, 8192 now)", "[6, 18] now)"):
        assert words in str(caught.value)


def test_samples_of_an_unknown_run_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).write_text('{"mine": 1}\n')
    with pytest.raises(EvaluationError, match="samples of an unknown run"):
        begin(tmp_path)
    assert (tmp_path / SAMPLES).read_text() == '{"mine": 1}\n'


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
def test_a_damaged_run_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN).write_text(text)
    with pytest.raises(EvaluationError, match="--fresh"):
        begin(tmp_path)
    begin(tmp_path, fresh=True).close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with begin(tmp_path) as recorder:
        recorder.add(sample(0))
        with pytest.raises(EvaluationError, match="another process is measuring into it"):
            begin(tmp_path)
        with pytest.raises(EvaluationError, match="another process is measuring into it"):
            begin(tmp_path, fresh=True)
        recorder.add(sample(1))
    with begin(tmp_path) as recorder:
        assert len(recorder.samples) == 2


# -- disks that refuse -------------------------------------------------------------------------------------


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper", Path("/proc/longfocus")):
        with pytest.raises(EvaluationError, match="choose another --out"):
            begin(place)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_said_and_what_was_there_stays(tmp_path: Path, disk: Callable[[int], None]) -> None:
    with begin(tmp_path) as recorder:
        recorder.add(sample(0))
        disk(3)
        with pytest.raises(EvaluationError, match=r"samples\.jsonl cannot be written: No space left"):
            recorder.add(sample(1))
        assert [found.id for found in recorder.samples] == ["0"]
    disk(1 << 30)
    assert not (tmp_path / SAMPLES).read_bytes().endswith(b"\n"), "half a line"
    with begin(tmp_path) as recorder:
        assert [found.id for found in recorder.samples] == ["0"]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets so many more bytes be written to files that recorders open."""
    import errno
    import io

    room = [1 << 30]

    class Small(io.FileIO):
        def write(self, data: Any) -> int:
            taken = min(len(data), room[0])
            if data and not taken:
                raise OSError(errno.ENOSPC, "No space left on device")
            room[0] -= taken
            return super().write(bytes(data)[:taken])

    original = Path.open

    def small(self: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        if mode != "a":
            return original(self, mode, *more, **options)
        return io.TextIOWrapper(io.BufferedWriter(Small(self, "ab")), **options)

    monkeypatch.setattr(record.Path, "open", small)

    def leave(count: int) -> None:
        room[0] = count

    return leave


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / RESULTS, {"old": 1})
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / RESULTS, {"new": list(range(1000))})
    assert json.loads((tmp_path / RESULTS).read_text()) == {"old": 1}
