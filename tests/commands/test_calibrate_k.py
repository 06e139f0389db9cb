"""`longfocus calibrate-k` and `--k-rule` as people meet them, in processes of their own.

python -m pytest tests/commands/test_calibrate_k.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longfocus import KRule
from tests.commands.conftest import WINDOW, longfocus

SMALL = ("--memory", 128, "--blocks", 4, "--windows", 1, "--k", 8, "--levels", "0.01,0.3")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, dict[str, Any], str]:
    """A rule, what the command printed, and what it said."""
    folder = tmp_path_factory.mktemp("rule")
    text = folder / "text.txt"
    text.write_text("".join(f"{n}. It was late, and neither the captain nor the mate slept.\n" for n in range(200)))
    out = folder / "rule.json"
    done = longfocus("calibrate-k", text, "--model", tiny_model, *SMALL, "--loss", 1000, "--out", out, "--json")
    assert done.code == 0, done.err
    return out, json.loads(done.out), done.err


def test_it_writes_the_strictest_rule_within_the_bound(calibrated: tuple[Path, dict[str, Any], str]) -> None:
    out, result, said = calibrated
    rule = KRule.read(out)
    assert result["out"] == str(out)
    assert (result["retrieval"], result["k"], result["memory_tokens"], result["measured_blocks"]) == (
        "exact",
        8,
        128,
        2,
    )
    assert [row["level"] for row in result["levels"]] == [0.01, 0.3]
    assert [row["written"] for row in result["levels"]] == [False, True]
    assert all(row["change_percent"] <= 1000 for row in result["levels"])
    assert rule.least_share == 0.3 / 8
    assert (rule.window, rule.balance_tokens) == (WINDOW, None)
    assert [layer for layer, _ in rule.skip_from] == [1, 2]
    assert "128 tokens of memory, 4 blocks" in rule.about
    assert "level 0.3" in rule.about
    assert f"The rule of level 0.3 is in {out}" in said


def test_a_bound_that_none_keeps_writes_nothing(tmp_path: Path, tiny_model: Path, prose: Path) -> None:
    out = tmp_path / "rule.json"
    done = longfocus("calibrate-k", prose, "--model", tiny_model, *SMALL, "--loss", -99, "--out", out)
    assert done.code == 2
    assert "No rule was written: even the mildest makes perplexity more than -99% larger." in done.err
    assert done.out.splitlines()[0].split()[:3] == ["level", "skipped", "by"]
    assert [line.split()[0] for line in done.out.splitlines()[1:]] == ["no", "0.01", "0.3"]
    assert not out.exists()


def test_ask_takes_the_rule(calibrated: tuple[Path, dict[str, Any], str], tiny_model: Path, prose: Path) -> None:
    asked = (
        "ask",
        prose,
        "Who slept?",
        "--model",
        tiny_model,
        "--k",
        8,
        "--max-new-tokens",
        4,
        "--k-rule",
        calibrated[0],
    )
    done = longfocus(*asked, "--retrieval", "exact")
    assert done.code == 0, done.err
    assert "no effect" not in done.err
    done = longfocus(*asked)
    assert done.code == 0, done.err
    assert "The k rule has no effect: all of the memory is attended to." in done.err


def test_eval_says_what_the_rule_did(
    calibrated: tuple[Path, dict[str, Any], str], tiny_model: Path, tmp_path: Path
) -> None:
    task = ("passkey", "--lengths", 400, "--samples", 2, "--set", "passkey.haystacks=[filler]", "--model", tiny_model)
    given = ("--retrieval", "exact", "--k", 8, "--k-rule", calibrated[0])
    done = longfocus("eval", *task, *given, "--out", tmp_path / "one", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    counts = result["k_by_query"]
    assert set(counts["skipped_by_layer"]) == {"1", "2"}
    assert 0 < counts["skipped"] < 1
    assert 0 < counts["mean_k"] < 8
    assert result["results"][0]["subject"]["focus"]["k_rule"] == KRule.read(calibrated[0]).to_dict()
    done = longfocus("eval", *task, *given, "--out", tmp_path / "two")
    assert f"k by query: {100 * counts['skipped']:.1f}% of {counts['retrievals']:,} retrievals skipped" in done.err
    done = longfocus("eval", *task, *given[:4], "--out", tmp_path / "three", "--json")
    assert "k_by_query" not in json.loads(done.out)


def test_a_damaged_or_foreign_rule_is_named(tmp_path: Path, tiny_model: Path, prose: Path) -> None:
    rule = tmp_path / "rule.json"
    rule.write_text('{"skip_from": {"1": [1, 2]}}')
    asked = ("ask", prose, "Who?", "--model", tiny_model, "--retrieval", "exact", "--k-rule", rule)
    done = longfocus(*asked)
    assert (done.code, done.out) == (2, "")
    assert "2 numbers for layer 1 given, expected one for each of its 6 query heads" in done.err
    rule.write_text('{"skip_from"')
    for command in (asked, ("eval", "passkey", "--model", tiny_model, "--k-rule", rule)):
        done = longfocus(*command)
        assert (done.code, done.out) == (2, "")
        assert f"{rule} holds no k rule, for it is not JSON" in done.err
        assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--levels", "a,b"), "--levels: 'a,b' given, expected numbers such as 0.01,0.05."),
        (("--levels", "0.3,0.1"), "from mild to strict"),
        (("--memory", "8q"), "--memory: "),
        (("--retrieval", "dense"), "'dense' given; k is chosen under 'exact' or 'approximate' retrieval"),
        (("--memory", "64k"), "expected 2 or more; give longer texts, or less --memory"),
        (("--out", "nowhere/rule.json"), "--out: nowhere is not a folder."),
        (("--loss", "nan"), "--loss: nan given"),
    ],
)
def test_impossible_options_are_named(tiny_model: Path, prose: Path, options: tuple[Any, ...], words: str) -> None:
    done = longfocus("calibrate-k", prose, "--model", tiny_model, *SMALL, *options)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "Traceback" not in done.err
