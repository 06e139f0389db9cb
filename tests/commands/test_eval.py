"""`longfocus eval` and `longfocus report` as people meet them: real processes, kills, Ctrl-C, a real server.

python -m pytest tests/commands/test_eval.py
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longfocus.evaluation.record import RESULTS, SAMPLES, Results
from longfocus.tasks import TASKS, contract
from tests import processes
from tests.commands.conftest import longfocus
from tests.subjects.served import Served

SMALL = ("--lengths", "200,400", "--samples", "4", "--set", "passkey.haystacks=[filler]")
NOWHERE = ("--model", "/nowhere/at/all")
"""A model that cannot be loaded: an error about anything else shows that it was found first."""


def run(*arguments: Any, **options: Any) -> processes.Ended:
    return longfocus("eval", *arguments, **options)


def refuses(*arguments: Any, **options: Any) -> str:
    """The one line on standard error of a command that ends with code 2 and prints nothing else."""
    done = run(*arguments, **options)
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("longfocus: ") and done.err.count("\n") == 1, done.err
    return done.err.removeprefix("longfocus: ").rstrip("\n")


def samples(folder: Path) -> list[dict[str, Any]]:
    """Lines of samples.jsonl, without how long each took."""
    found = [json.loads(line) for line in (folder / SAMPLES).read_text("utf-8").splitlines()]
    for line in found:
        line["details"].pop("seconds")
        line["details"].pop("tokens_read_with_others", None)
    return found


def comparable(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / RESULTS).read_text("utf-8"))
    return {name: value for name, value in data.items() if name not in ("about", "seconds")}


# -- the main path -----------------------------------------------------------------------------------------


def test_a_task_becomes_table_json_plot_and_page(tiny_model: Path, tmp_path: Path) -> None:
    done = run("passkey", "--model", tiny_model, *SMALL, cwd=tmp_path)
    assert done.code == 0, done.err
    folder = tmp_path / "eval" / "tiny" / "passkey"
    assert {path.name for path in folder.iterdir()} == {
        "lock", "plot.png", "results.json", "run.json", "samples.jsonl", "table.md",
    }  # fmt: skip
    found = Results.read(folder)
    assert [row.values["tokens"] for row in found.rows] == [200, 400]
    assert (found.model, found.options["samples"], found.stopped) == ("tiny", 4, False)
    assert found.about["command"][:3] == ["longfocus", "eval", "passkey"]
    assert (folder / "table.md").read_text().strip() in done.out
    assert "Pass-key retrieval: tiny" in done.out and "2307.03170" in done.out
    assert "Results, samples and plots: eval/tiny" in done.err and "Traceback" not in done.err

    plain = run("passkey", "--model", tiny_model, "--plain", *SMALL, "--json", cwd=tmp_path)
    assert plain.code == 0, plain.err
    assert plain.out.count("\n") == 1
    (told,) = json.loads(plain.out)["results"]
    assert json.loads(plain.out)["out"] == "eval/tiny-full-attention"
    assert told["subject"]["kind"] == "plain" and len(told["rows"]) == 2

    page = longfocus("report", "eval", "--to", "out/page.html", "--title", "Mine <&>", cwd=tmp_path)
    assert (page.code, page.out) == (0, ""), page.err
    assert "2 results of 2 models: out/page.html" in page.err
    text = (tmp_path / "out" / "page.html").read_text("utf-8")
    assert "Mine &lt;&amp;&gt;" in text and "tiny, full attention" in text and text.count("data:image/png") == 1


def test_another_name_another_folder_and_no_name_leaves_the_place(tiny_model: Path, tmp_path: Path) -> None:
    for name, folder in (("Mine: 1/2", "eval/Mine-1-2"), ("../..", "eval/model"), ("日本", "eval/日本")):
        done = run("passkey", "--model", tiny_model, *SMALL, "--samples", "1", "--name", name, cwd=tmp_path)
        assert done.code == 0, done.err
        assert Results.read(tmp_path / folder / "passkey").model == name


def test_quick_sizes_can_be_changed(tiny_model: Path, tmp_path: Path) -> None:
    done = run(
        "passkey", "--model", tiny_model, "--quick", "--lengths", "300", "--set", "passkey.haystacks=[filler]",
        "--set", "passkey.depths=[0, 1]", "--seed", "7", "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.code == 0, done.err
    options = Results.read(tmp_path / "run" / "passkey").options
    assert (options["lengths"], options["samples"], options["depths"], options["seed"]) == ([300], 8, [0.0, 1.0], 7)


def test_texts_of_ones_own_take_the_place_of_a_set(tiny_model: Path, tmp_path: Path, prose: Path) -> None:
    more = ("--set", "passkey.haystacks=[books]", "--lengths", "200", "--samples", "2")
    own_texts = ("--text", f"books={prose}", "--text", f"boks={prose}")
    done = run("passkey", "--model", tiny_model, *more, *own_texts, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "No task asked for the text 'boks'" in done.err
    own = Results.read(tmp_path / "run" / "passkey").options["own_texts"]
    assert re.fullmatch(r"1 document, sha256 [0-9a-f]{16}", own["books"])
    prose.write_text(prose.read_text() + "One more line.\n")
    done = run("passkey", "--model", tiny_model, *more, *own_texts, "--out", tmp_path / "run")
    message = done.err.splitlines()[-1]
    assert done.code == 2
    assert "options.own_texts.books (" in message


# -- lists -------------------------------------------------------------------------------------------------


def test_the_list_names_every_task_with_its_options() -> None:
    done = run("--list")
    assert (done.code, done.err) == (0, "")
    for name in TASKS:
        assert re.search(rf"^{name}: .+ \((any model|a model that runs here|a model with a memory)\)$", done.out, re.M)
        assert f"--set {name}.seed=0\n" in done.out
    assert "--set passkey.lengths=[2048, 8192, 32768]\n        Prompt lengths in tokens.\n" in done.out
    one = run("--list", "passkey")
    assert one.out.startswith("passkey: ") and "perplexity" not in one.out
    as_json = json.loads(run("--list", "--json").out)
    assert [entry["name"] for entry in as_json] == list(TASKS)
    for entry in as_json:
        assert set(entry) == {"name", "title", "paper", "measures", "needs", "options", "quick"}
        assert all("description" in option for option in entry["options"].values()), entry["name"]


_IMPORTS = """
import sys
from contextlib import suppress
sys.argv = {argv}
with suppress(SystemExit):
    from longfocus.cli import main; main()
print([name for name in {names} if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["longfocus", "--help"], "numpy torch transformers scipy matplotlib pydantic httpx sklearn"),
        (["longfocus", "eval", "--help"], "numpy torch transformers scipy matplotlib httpx sklearn"),
        (["longfocus", "report", "--help"], "numpy torch transformers scipy matplotlib httpx sklearn"),
    ],
)
def test_help_loads_nothing_heavy(argv: list[str], names: str) -> None:
    code = _IMPORTS.format(argv=argv, names=names.split())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


# -- refusals, before a model is loaded --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "No task given; expected some of passkey"),
        (["paskey"], "paskey is not a task. Did you mean 'passkey'? Known: passkey, "),
        (["my_task.py"], "my_task.py is not there"),
        (["passkey", "--set", "passkey.samples"], "--set 'passkey.samples' given, expected TASK.KEY=VALUE"),
        (["passkey", "--set", "samples=3"], "expected TASK.KEY=VALUE with one of passkey"),
        (["passkey", "--focus", "balance_tokens"], "--focus 'balance_tokens' given, expected key=value"),
        (["passkey", "--focus", "balance_token=3"], "Did you mean 'balance_tokens'?"),
        (["passkey", "--focus", "balance_tokens=x"], "balance_tokens: 'x' given, expected a whole number"),
        (["passkey", "--focus", "k=3", "--k", "4"], "--focus k=…: --k was given too; give one of them"),
        (["passkey", "--plain", "--focus", "window_first=kept"], "a plain model has no memory"),
        (["passkey", "--set", "perplexity.seed=3"], "expected TASK.KEY=VALUE with one of passkey"),
        (["passkey", "--set", "pasky.seed=3"], "Did you mean 'passkey'?"),
        (["passkey", "--set", "passkey.=3"], "expected TASK.KEY=VALUE"),
        (
            ["passkey", "--set", "passkey.sample=3"],
            "options of passkey: sample is not a key here. Did you mean 'samples'? Known: seed, lengths, samples, "
            "haystacks, depths",
        ),
        (["passkey", "--set", "passkey.samples=0"], "options of passkey: samples: 0 given; "),
        (["passkey", "--set", "passkey.samples=many"], "options of passkey: samples: 'many' given; "),
        (["passkey", "--set", "passkey.depths=[2]"], "options of passkey: depths.0: 2 given; "),
        (["passkey", "--set", "passkey.haystacks=[bible]"], "'bible' given"),
        (["passkey", "--set", "passkey.samples=["], "the value is not YAML"),
        (["passkey", "--set", "passkey.lengths=8kk"], "lengths: '8kk' given, expected a size in tokens"),
        (
            ["passkey", "--lengths", "2k,eight"],
            "--lengths: 'eight' given, expected a size in tokens such as 4096, 8k or 1M.",
        ),
        (["passkey", "--lengths", ""], "--lengths: '' given, expected a size"),
        (["passkey", "--lengths", "0"], "options of passkey: lengths.0: 0 given"),
        (["passkey", "--text", "books"], "--text 'books' given, expected NAME=PATH"),
        (["passkey", "--text", "books=/no/such/file"], "--text books=/no/such/file: /no/such/file does not exist"),
        (["passkey", "--data", "/no/such/folder"], "--data: /no/such/folder is not a folder"),
        (["passkey", "--dtype", "int3"], "--dtype: 'int3' given, expected one of float32, float16, bfloat16"),
        (["passkey", "--dtype", "int8"], "--dtype: 'int8' given, expected one of float32, float16, bfloat16"),
        (["passkey", "--memory-layers", "six"], "--memory-layers: 'six' given"),
        (["passkey", "--window", "1"], "window: 1 given, expected a whole number of 2 or more"),
        (["passkey", "--retrieval", "fuzzy"], "retrieval: 'fuzzy' given, expected one of dense, exact"),
        (["passkey", "--plain", "--window", "64"], "--window: a plain model has no memory; leave --plain"),
        (["passkey", "--plain", "--read-span", "-1"], "--read-span: a plain model has no memory"),
        (["passkey", "--chat"], "--chat: for a model behind an endpoint; give --endpoint too."),
        (["passkey", "--longest", "8k", "--timeout", "3"], "--longest, --timeout: for a model behind an endpoint"),
        (["passkey", "--tokenizer", "x"], "--tokenizer: for a model behind an endpoint"),
        (
            ["passkey", "--endpoint", "http://h/v1", "--plain"],
            "--endpoint: the model runs elsewhere; leave --plain out.",
        ),
        (
            ["passkey", "--endpoint", "http://h/v1", "--window", "64", "--dtype", "float32", "--device", "cpu"],
            "--endpoint: the model runs elsewhere; leave --dtype, --device, --window out.",
        ),
        (["passkey", "--endpoint", "http://h/v1", "--longest", "long"], "--longest: 'long' given, expected a size"),
        (["distraction", "--plain"], "distraction cannot be measured on a plain model: it looks into memory layers"),
        (
            ["perplexity", "--endpoint", "http://h/v1"],
            "perplexity cannot be measured on an endpoint: it needs probabilities",
        ),
        (["passkey", "--threads", "0"], "--threads: 0 given, expected 1 or more"),
        (["passkey"], "/nowhere/at/all is not a folder with a model"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(arguments: list[str], words: str, tmp_path: Path) -> None:
    message = refuses(*arguments, *NOWHERE, cwd=tmp_path)
    assert words in message
    assert list(tmp_path.iterdir()) == []


def test_an_endpoint_needs_a_models_name() -> None:
    assert "say with --model what the model is called there" in refuses(
        "passkey", "--endpoint", "http://localhost:1/v1"
    )


def test_an_option_that_a_task_lacks_is_said(tiny_model: Path, tmp_path: Path) -> None:
    done = processes.run(
        "tests.evaluation.children:with_small_tasks", "eval", "letters", "--lengths", "2k", "--samples", "3",
        "--model", str(tiny_model), "--out", str(tmp_path / "run"),
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "letters has no lengths: --lengths does not change it." in done.err
    assert "letters has no samples: --samples does not change it." in done.err


def test_missing_data_names_the_folder_and_what_to_do(tiny_model: Path, tmp_path: Path) -> None:
    more = ("--set", "passkey.haystacks=[books]", "--lengths", "200")
    for place in ({"LONGFOCUS_DATA": str(tmp_path)}, {}):
        data = () if place else ("--data", tmp_path)
        message = run("passkey", "--model", tiny_model, *more, *data, cwd=tmp_path, **place).err.splitlines()[-1]
        assert f"{tmp_path}/books/test.jsonl.gz is not there; say with --data (or LONGFOCUS_DATA)" in message
        assert "docs/evaluate.md" in message and "--text NAME=PATH" in message
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "test.jsonl.gz").write_bytes(b"not gzip")
    message = run("passkey", "--model", tiny_model, *more, "--data", tmp_path, cwd=tmp_path).err.splitlines()[-1]
    assert "books/test.jsonl.gz is not gzip-compressed JSON lines" in message


# -- all tasks ---------------------------------------------------------------------------------------------


def small(*arguments: Any, **options: Any) -> processes.Ended:
    return processes.run("tests.evaluation.children:with_small_tasks", "eval", *map(str, arguments), **options)


def test_all_leaves_out_what_does_not_fit_and_says_so(tiny_model: Path, tmp_path: Path) -> None:
    done = small(
        "all", "--model", tiny_model, "--plain", "--out", tmp_path / "run", "--data", tmp_path, "--lengths", "9"
    )
    assert done.code == 0, done.err
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"letters", "loss"}
    left = [line for line in done.err.splitlines() if line.startswith("Left out: ")]
    whys = (
        "records cannot be measured on a plain model: it looks",
        "books/test.jsonl.gz is not there",
        "toolong: nothing",
    )
    assert len(left) == 3
    for line, why in zip(left, whys, strict=True):
        assert why in line
    assert "--lengths" not in done.err, "with all, options that some tasks lack are meant for the others"
    focused = small("all", "--model", tiny_model, "--out", tmp_path / "focused", "--data", tmp_path)
    assert {path.name for path in (tmp_path / "focused").iterdir()} == {"letters", "loss", "records", "toolong"}
    assert focused.code == 0


def test_all_stops_at_what_is_no_matter_of_fitting(tiny_model: Path, tmp_path: Path) -> None:
    """A folder of another run is not left out in silence."""
    assert small("letters", "--model", tiny_model, "--out", tmp_path / "run").code == 0
    done = small("all", "--model", tiny_model, "--out", tmp_path / "run", "--seed", "5", "--data", tmp_path)
    assert done.code == 2
    assert "holds a run with other settings: options.seed (0 there, 5 now)" in done.err
    assert small("all", "--model", tiny_model, "--out", tmp_path / "run", "--seed", "5", "--fresh").code == 0


def test_where_no_task_fits_it_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    for tasks in (["toolong"], ["missing"]):
        done = small(*tasks, "--model", tiny_model, "--plain", "--data", tmp_path, "--out", tmp_path / "run")
        assert done.code == 2 and done.err.splitlines()[-1].startswith("longfocus: ")
    assert not (tmp_path / "run").exists()


def test_several_tasks_stand_in_one_folder_and_one_document(tiny_model: Path, tmp_path: Path) -> None:
    done = small("records", "letters", "records", "--model", tiny_model, "--out", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert [result["task"] for result in json.loads(done.out)["results"]] == ["records", "letters"]


# -- a task of one's own -----------------------------------------------------------------------------------


def example() -> str:
    """The task in the docstring of tasks/contract.py, as a file."""
    lines = (contract.__doc__ or "").partition("A whole one:\n")[2].partition("\nSame options")[0]
    return textwrap.dedent(lines).strip() + "\n"


def test_the_example_in_the_contract_works_as_it_stands(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "capitals.py").write_text(example())
    done = run("capitals.py", "passkey", "--model", tiny_model, *SMALL, "--samples", "1", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "capitals has no samples" in done.err
    found = Results.read(tmp_path / "eval" / "tiny" / "capitals")
    assert [(row.values, row.samples) for row in found.rows] == [
        ({"continent": "Asia"}, 2),
        ({"continent": "Europe"}, 2),
    ]
    assert "made up" in done.out
    assert "capitals: Capitals (any model)" in run("--list", "capitals.py", cwd=tmp_path).out
    assert longfocus("report", "eval", cwd=tmp_path).code == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("TASK = Capitals", ""), "holds no task; at its end write TASK = TheClass"),
        (("TASK = Capitals", "TASK = Capitals()"), "cannot be loaded: TypeError"),
        (("TASK = Capitals", "TASK = int"), "holds no task"),
        (("import Prompt", "import Promt"), "cannot be loaded: ImportError: cannot import name 'Promt'"),
        (("def score", "def scor"), "Capitals lacks score"),
        (('paper = "made up"', ""), "Capitals lacks paper"),
        (('name, title = "capitals", ', "title = "), "Capitals lacks name"),
        (('"capitals", ', '"../x", '), "is named '../x', expected letters"),
        (('"capitals", ', '"passkey", '), "like one of longfocus' own tasks"),
        (("class Capitals(AnswerTask):", "class Capitals(AnswerTask:"), "cannot be loaded: SyntaxError"),
        (("TASK = Capitals", "raise ValueError('one\\ntwo')"), "cannot be loaded: ValueError: one two"),
        (("max_new_tokens = 8", "needs = 'magic'"), "has needs = 'magic', expected one of complete, losses, memory"),
        (("max_new_tokens = 8", "stop = '['"), "has stop = '[', expected a regular expression"),
        (("max_new_tokens = 8", "Options = dict"), "has Options that are no subclass of TaskOptions"),
        (('(Measure("right", "share", "higher"),)', '("right",)'), "has measures that are no Measure"),
    ],
)
def test_a_task_file_with_a_mistake_is_told_what_is_wrong(change: tuple[str, str], words: str, tmp_path: Path) -> None:
    text = example()
    assert change[0] in text
    (tmp_path / "capitals.py").write_text(text.replace(*change))
    message = refuses("capitals.py", *NOWHERE, cwd=tmp_path)
    assert words in message and "capitals.py" in message


def test_a_task_without_a_description_is_listed_by_its_title(tmp_path: Path) -> None:
    (tmp_path / "capitals.py").write_text(example().replace('    """', '    # """', 1))
    done = run("--list", "capitals.py", cwd=tmp_path)
    assert done.code == 0 and done.out.startswith("capitals: Capitals (any model)\n    Capitals\n"), done


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(example())
    assert "Two tasks are named 'capitals'" in refuses("a.py", "b.py", *NOWHERE, cwd=tmp_path)


# -- stops -------------------------------------------------------------------------------------------------


def start(tiny_model: Path, out: Path) -> processes.Child:
    command = ("eval", "passkey", "--model", str(tiny_model), *SMALL, "--samples", "8", "--out", str(out))
    return processes.start("tests.commands.children:longfocus", *command)


@pytest.fixture(scope="module")
def unbroken(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    ended = start(tiny_model, folder).wait()
    assert ended.code == 0, ended.err
    return folder / "passkey"


def test_killed_again_and_again_it_ends_with_the_results_of_an_unbroken_run(
    tiny_model: Path, unbroken: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "passkey"
    for after in (1, 2, 5, 9, 12):

        def enough(after: int = after) -> bool:
            return (folder / SAMPLES).exists() and (folder / SAMPLES).read_bytes().count(b"\n") >= after

        child = start(tiny_model, tmp_path)
        child.wait_for(enough)
        child.kill()
        assert child.wait().code == -signal.SIGKILL
        for line in (folder / SAMPLES).read_bytes().split(b"\n")[:-1]:
            json.loads(line)
        if (folder / RESULTS).exists():
            assert Results.read(folder).stopped
        if after == 5:  # a kill may tear a line
            with (folder / SAMPLES).open("ab") as file:
                file.write(b'{"id": "7", "values": {"tok')
    ended = start(tiny_model, tmp_path).wait()
    assert ended.code == 0, ended.err
    assert samples(folder) == samples(unbroken)
    assert comparable(folder) == comparable(unbroken)
    assert (folder / "table.md").read_text() == (unbroken / "table.md").read_text()


def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(
    tiny_model: Path, unbroken: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "passkey"
    child = start(tiny_model, tmp_path)
    child.wait_for(lambda: (folder / SAMPLES).exists() and (folder / SAMPLES).read_bytes().count(b"\n") >= 3)
    child.kill(signal.SIGINT)
    ended = child.wait()
    assert ended.code == 130, ended.err
    assert "Traceback" not in ended.err
    assert f"Stopped; what was measured is in {folder}, and the same command goes on." in ended.err
    assert "Not finished" in ended.out
    kept = Results.read(folder)
    count = len(samples(folder))
    assert kept.stopped and 3 <= count < 16 and sum(row.samples for row in kept.rows) in (count - 1, count)
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG") and not list(folder.glob("*.new"))
    page = longfocus("report", tmp_path, "--to", tmp_path / "page.html")
    assert page.code == 0 and "Not finished: tiny." in (tmp_path / "page.html").read_text("utf-8")
    assert start(tiny_model, tmp_path).wait().code == 0
    assert comparable(folder) == comparable(unbroken)


def test_two_at_once_do_not_mix(tiny_model: Path, unbroken: Path, tmp_path: Path) -> None:
    first = start(tiny_model, tmp_path)
    first.wait_for(lambda: (tmp_path / "passkey" / SAMPLES).exists())
    second = start(tiny_model, tmp_path).wait()
    assert first.wait().code == 0
    assert second.code == 0 or (second.code == 2 and "another process is measuring into it" in second.err)
    assert comparable(tmp_path / "passkey") == comparable(unbroken)


def test_other_options_are_refused_by_name_and_fresh_begins_anew(
    tiny_model: Path, other_model: Path, unbroken: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(unbroken.parent, tmp_path / "run"))
    base = ("passkey", "--out", folder, *SMALL)
    before = (folder / "passkey" / SAMPLES).read_bytes()
    for more, words in (
        (("--model", tiny_model, "--samples", "9"), "options.samples (8 there, 9 now)"),
        (("--model", tiny_model, "--samples", "8", "--seed", "1"), "options.seed (0 there, 1 now)"),
        (
            ("--model", tiny_model, "--samples", "8", "--read-span", "64"),
            "subject.focus.read_span (4096 there, 64 now)",
        ),
        (("--model", tiny_model, "--samples", "8", "--plain"), 'subject.kind ("focused" there, "plain" now)'),
        (("--model", other_model, "--samples", "8", "--name", "tiny"), "subject.fingerprint ("),
    ):
        done = run(*base, *more)
        assert done.code == 2 and words in done.err.splitlines()[-1], done.err
        assert "Choose another --out, or --fresh" in done.err
    assert (folder / "passkey" / SAMPLES).read_bytes() == before
    done = run(*base, "--model", tiny_model, "--samples", "1", "--fresh")
    assert done.code == 0 and len(samples(folder / "passkey")) == 2


# -- endpoints ---------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[Served]:
    def answer(prompt: str) -> str:
        return " " + re.findall(r"The pass key is (\d{5})", prompt)[0] + ". And more."

    with Served(answer) as found:
        yield found


def test_a_model_behind_an_endpoint_is_measured(served: Served, tiny_model: Path, tmp_path: Path) -> None:
    command = (
        "passkey", "--endpoint", served.url, "--model", "org/far-away", "--chat", "--tokenizer", tiny_model,
        "--longest", "300", *SMALL,
    )  # fmt: skip
    done = run(*command, cwd=tmp_path, OPENAI_API_KEY="sk-secret-123456")
    assert done.code == 0, done.err
    assert "Not measured: tokens=400, haystack=filler: org/far-away takes 300 tokens, this needs 410." in done.err
    folder = tmp_path / "eval" / "org-far-away" / "passkey"
    found = Results.read(folder)
    assert [(row.values["tokens"], row.estimates["right"].value) for row in found.rows] == [(200, 1.0)]
    assert len(served.requests) == 4
    assert all(headers["authorization"] == "Bearer sk-secret-123456" for _, headers, _ in served.requests)
    for path in folder.iterdir():
        assert b"sk-secret" not in path.read_bytes()


def test_an_endpoint_that_fails_stops_all_and_the_same_command_goes_on(
    served: Served, tiny_model: Path, tmp_path: Path
) -> None:
    command = (
        "passkey", "--endpoint", served.url, "--model", "far", "--tokenizer", tiny_model, *SMALL, "--out", tmp_path,
    )  # fmt: skip
    served.plan = [served.completion("/v1/completions", {"prompt": "The pass key is 12345"})] * 2 + [(401, {}, "who?")]
    done = run(*command)
    assert done.code == 2
    assert done.err.splitlines()[-1].endswith("refused with 401: who? Set OPENAI_API_KEY.")
    assert len(samples(tmp_path / "passkey")) == 2
    assert run(*command).code == 0
    assert len(served.requests) == 3 + 6


# -- report ------------------------------------------------------------------------------------------------


def test_a_report_of_nothing_says_what_is_missing(tmp_path: Path, unbroken: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        (["empty"], "empty holds no results.json"),
        (["nowhere"], "nowhere does not exist"),
        ([unbroken, "--to", "empty"], "empty cannot be written: Is a directory"),
    ):
        done = longfocus("report", *arguments, cwd=tmp_path)
        assert done.code == 2 and done.out == "" and words in done.err, done.err
