"""From paths to texts: what is read comes back as it was, and what cannot be read says why in one line.

Real files, folders, pipes, devices and PDFs; nothing is mocked but standard input. The last test streams 200 MB.

    python -m pytest tests/data/test_documents.py
"""

from __future__ import annotations

import io
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from longfocus.data.documents import BLOCK_BYTES, Source, find_sources
from longfocus.errors import InputError
from tests.data.pdf import pdf
from tests.small_tokenizers import SAMPLES

NOBODY = 65534


def text_of(source: Source) -> str:
    return "".join(text for _, text in source.blocks())


def read_one(path: Path | str, encoding: str | None = None) -> str:
    found = find_sources([path], encoding=encoding)
    assert len(found.sources) == 1
    assert found.skipped == []
    return text_of(found.sources[0])


def refusal(path: Path | str, encoding: str | None = None) -> str:
    """The message that refuses a path: one line that names it."""
    with pytest.raises(InputError) as refused:
        find_sources([path], encoding=encoding)
    message = str(refused.value)
    assert "\n" not in message
    return message


# -- texts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_text_in_any_script_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes((SAMPLES[name] * 3).encode())
    assert read_one(path) == SAMPLES[name] * 3


def test_one_path_is_one_path_and_no_list_of_letters(tmp_path: Path) -> None:
    """A string is a sequence of strings, and its first may be `/`."""
    (tmp_path / "a.txt").write_text("hello")
    for given in (str(tmp_path / "a.txt"), tmp_path / "a.txt"):
        assert [source.path for source in find_sources(given).sources] == [tmp_path / "a.txt"]


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("hello")
    found = find_sources([tmp_path / "b.txt", tmp_path, tmp_path / "a.txt"])
    assert sorted(source.path.name for source in found.sources if source.path) == ["a.txt", "b.txt"]


def test_halves_of_characters_that_a_codec_lets_through_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"+2AA-")
    with pytest.raises(InputError, match="is not utf-7 text"):
        read_one(tmp_path / "a.txt", "utf-7")


def test_a_file_that_vanishes_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    source = find_sources(tmp_path / "a.txt").sources[0]
    (tmp_path / "a.txt").unlink()
    for ask in (lambda: source.fields, lambda: source.size_bytes, lambda: text_of(source)):
        with pytest.raises(InputError, match="cannot be read: No such file"):
            ask()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\u2028", "\x0b\x0c\x85"])
def test_line_ends_come_back_as_they_were(end: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(f"one{end}two{end}{end}".encode())
    assert read_one(path) == f"one{end}two{end}{end}"


@pytest.mark.parametrize("shift", range(5))
def test_characters_across_a_block_edge_stay_whole(shift: int, tmp_path: Path) -> None:
    text = "a" * (BLOCK_BYTES - shift) + "👩‍👩‍👧‍👦\r\n" + "é" * BLOCK_BYTES
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    assert read_one(path) == text


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_byte_order_mark_tells_the_encoding_and_is_not_text(encoding: str, tmp_path: Path) -> None:
    text = "".join(SAMPLES.values()) * 100
    path = tmp_path / "text"
    path.write_bytes((text if encoding in ("utf-8-sig", "utf-16") else "\ufeff" + text).encode(encoding))
    assert read_one(path) == text


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16-le", "koi8-r", "shift_jis"])
def test_a_named_encoding_is_used(encoding: str, tmp_path: Path) -> None:
    text = {"koi8-r": SAMPLES["cyrillic"].replace("—", "-"), "shift_jis": "吾輩は猫である。\n"}.get(
        encoding, "déjà vu, très tard\n"
    )
    path = tmp_path / "text"
    path.write_bytes(text.encode(encoding))
    assert read_one(path, encoding) == text


def test_a_source_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("once\n" * 20_000)
    source = find_sources([path]).sources[0]
    assert text_of(source) == text_of(source) == "once\n" * 20_000


def test_bytes_read_so_far_grow_to_the_size_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("é" * BLOCK_BYTES)
    source = find_sources([path]).sources[0]
    counts = [done for done, _ in source.blocks()]
    assert counts == sorted(counts)
    assert counts[-1] == source.size_bytes == path.stat().st_size == 2 * BLOCK_BYTES


def test_a_source_says_which_file_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("hello")
    monkeypatch.chdir(tmp_path)
    source = find_sources(["a.txt"]).sources[0]
    status = os.stat("a.txt")
    assert source.name == "a.txt"
    assert source.fields == {
        "kind": "text",
        "path": str(tmp_path / "a.txt"),
        "source_bytes": 5,
        "source_mtime_ns": status.st_mtime_ns,
    }


@pytest.mark.parametrize(
    "name", ["日本語 текст.txt", "with\nnewline", "-dash", "spa ce", b"caf\xe9".decode("utf-8", "surrogateescape")]
)
def test_file_names_may_be_anything(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("hello")
    assert read_one(tmp_path / name) == "hello"
    assert [text_of(source) for source in find_sources([tmp_path]).sources] == ["hello"]


# -- refusals ----------------------------------------------------------------------------------------------


def test_a_missing_path(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere.txt") == f"{tmp_path / 'nowhere.txt'} does not exist."
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere.txt")
    assert "dangling does not exist" in refusal(tmp_path / "dangling")


@pytest.mark.parametrize("name", ["x" * 300, "What does the narrator say? " * 400, "nul\0byte"])
def test_what_can_be_no_path_is_refused(name: str) -> None:
    """Someone has put the question where a path belongs."""
    assert len(refusal(name)) < 300


@pytest.mark.parametrize("content", [b"", b"\n", b" \t\r\n\n", "\u3000\u00a0".encode(), b"\xef\xbb\xbf"])
def test_a_text_of_nothing_is_empty(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    assert refusal(path) == f"{path} is empty; there is nothing to read."


@pytest.mark.parametrize(
    "content",
    [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"text\n" * (BLOCK_BYTES // 5) + b"then a \0 byte", b"MZ\x90\0\x03\0\0\0"],
    ids=["image", "late", "program"],
)
def test_a_binary_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content)
    assert f"{path} is a binary file" in refusal(path)


def test_text_in_another_encoding_names_the_option(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_bytes("déjà vu".encode("latin-1"))
    assert refusal(path).startswith(f"{path} is not utf-8 text (near byte 1); name its encoding")
    assert "--encoding latin-1" in refusal(path)


@pytest.mark.parametrize("at", [BLOCK_BYTES - 1, BLOCK_BYTES, 7 * BLOCK_BYTES + 13])
def test_one_wrong_byte_in_a_large_file_is_placed(at: int, tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    data = bytearray(b"all is well\n" * (8 * BLOCK_BYTES // 12 + 1))
    data[at] = 0xFF
    path.write_bytes(data)
    message = refusal(path)
    near = int(message.partition("near byte ")[2].partition(")")[0])
    assert abs(near - at) <= 4


def test_a_character_cut_off_at_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.txt"
    path.write_bytes("good until here 👍".encode()[:-1])
    assert "is not utf-8 text" in refusal(path)
    path.write_bytes("\ufeffgood".encode("utf-16-le")[:-1])
    assert "is not utf-16 text" in refusal(path)


@pytest.mark.parametrize("encoding", ["nonsense", "", "hex", "base64", "rot13", "zip", "undefined", "utf-8\0"])
def test_an_encoding_that_is_none(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("hello")
    message = refusal(path, encoding)
    assert "encoding" in message
    assert repr(encoding) in message or encoding in message


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_neither_file_nor_folder(kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    else:
        path = Path("/dev/zero")
    assert refusal(path) == f"{path} is neither a file nor a folder."


@pytest.fixture
def not_root() -> Iterator[Path]:
    """A folder of ours, seen as a user who may read only what everyone may."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    root = os.geteuid() == 0
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        subprocess.run(["rm", "-rf", "--", str(folder)], check=True)


def _become_nobody() -> None:
    if os.geteuid() == 0:
        os.seteuid(NOBODY)


def test_no_permission_to_read_a_file(not_root: Path) -> None:
    path = not_root / "secret.txt"
    path.write_text("hello")
    path.chmod(0)
    _become_nobody()
    assert refusal(path) == f"{path} cannot be read: Permission denied."


def test_no_permission_to_enter_a_folder(not_root: Path) -> None:
    closed = not_root / "closed"
    closed.mkdir()
    (closed / "text.txt").write_text("hello")
    closed.chmod(0)
    _become_nobody()
    assert "Permission denied" in refusal(closed / "text.txt")
    assert "Permission denied" in refusal(closed)


def test_what_may_not_be_read_in_a_folder_is_skipped_with_the_reason(not_root: Path) -> None:
    for name in ("open.txt", "secret.txt"):
        (not_root / name).write_text("hello")
    (not_root / "secret.txt").chmod(0)
    (not_root / "closed").mkdir()
    (not_root / "closed").chmod(0)
    _become_nobody()
    found = find_sources([not_root])
    assert [source.path for source in found.sources] == [not_root / "open.txt"]
    assert dict(found.skipped) == {
        str(not_root / "secret.txt"): "cannot be read: Permission denied",
        str(not_root / "closed"): "cannot be opened: Permission denied",
    }


def test_files_of_a_folder_that_may_be_listed_but_not_entered_are_skipped(not_root: Path) -> None:
    (not_root / "open.txt").write_text("hello")
    (not_root / "listed").mkdir()
    (not_root / "listed" / "text.txt").write_text("hello")
    (not_root / "listed").chmod(0o444)
    _become_nobody()
    found = find_sources([not_root])
    assert [source.path for source in found.sources] == [not_root / "open.txt"]


# -- folders -----------------------------------------------------------------------------------------------


def test_a_folder_is_read_in_sorted_order_without_what_is_hidden_or_made(tmp_path: Path) -> None:
    wanted = ["a.py", "c.rst", "b/a.py", "b/d.md", "b/c/z.txt", "k/1", "m/1", "n/1", "o/1", "z/é.txt"]
    unwanted = [
        ".hidden",
        ".git/config",
        "b/.cache/x.txt",
        "__pycache__/a.txt",
        "node_modules/x.js",
        "dist/x.txt",
        "thing.egg-info/PKG-INFO",
    ]
    for name in (*wanted[::-1], *unwanted):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_sources([tmp_path])
    assert [text_of(source) for source in found.sources] == wanted, "a folder's files, then its folders"
    assert [source.name for source in found.sources] == [str(tmp_path / name) for name in wanted]
    assert found.skipped == []


def test_a_folder_skips_what_is_no_text_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("hello")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "old.txt").write_bytes(b"d\xe9j\xe0")
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.7\n")
    os.mkfifo(tmp_path / "pipe")
    found = find_sources([tmp_path])
    assert [source.path for source in found.sources] == [tmp_path / "good.txt"]
    reasons = {Path(name).name: reason for name, reason in found.skipped}
    assert set(reasons) == {"empty.txt", "image.png", "old.txt", "broken.pdf"}
    assert reasons["empty.txt"] == "is empty; there is nothing to read"
    assert reasons["image.png"].startswith("is a binary file")
    assert reasons["old.txt"].startswith("is not utf-8 text (near byte 1)")
    assert reasons["broken.pdf"].startswith("is not a readable PDF")


def test_a_folder_without_any_text_is_refused_with_the_reasons(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"Nothing to read in {tmp_path}."
    (tmp_path / "empty.txt").write_text("")
    assert (
        refusal(tmp_path)
        == f"Nothing to read in {tmp_path} ({tmp_path / 'empty.txt'} is empty; there is nothing to read)."
    )


def test_a_saved_memory_inside_a_folder_is_not_read_as_text(tmp_path: Path) -> None:
    """Else `longfocus remember . --into ./x.memory`, run twice, would read the memory into itself."""
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "x.memory").mkdir()
    for name in ("memory.json", "journal.jsonl", "text.1.bin"):
        (tmp_path / "x.memory" / name).write_text('{"format": "longfocus-memory"}')
    assert [source.path for source in find_sources([tmp_path]).sources] == [tmp_path / "text.txt"]


def test_a_link_back_to_a_parent_folder_does_not_go_round(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "again").symlink_to(tmp_path)
    assert len(find_sources([tmp_path]).sources) == 1


def test_paths_are_read_in_the_order_given(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "folder/d.txt", "folder/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_sources([tmp_path / "b.txt", tmp_path / "folder", tmp_path / "a.txt"])
    assert [text_of(source) for source in found.sources] == ["b.txt", "folder/c.txt", "folder/d.txt", "a.txt"]


def test_one_wrong_path_among_good_ones_stops_everything(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("hello")
    with pytest.raises(InputError, match=r"wrong\.txt does not exist"):
        find_sources([tmp_path / "good.txt", tmp_path / "wrong.txt"])


# -- standard input ----------------------------------------------------------------------------------------


class _Stdin:
    """Standard input that gives at most 7 bytes at once, as a slow pipe does."""

    def __init__(self, data: bytes) -> None:
        self.buffer = self
        self._data = io.BytesIO(data)

    def read(self, count: int = -1) -> bytes:
        return self._data.read(min(count, 7) if count >= 0 else -1)


def test_standard_input_is_read_whole_and_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(SAMPLES.values())
    monkeypatch.setattr(sys, "stdin", _Stdin(text.encode()))
    source = find_sources(["-"]).sources[0]
    assert text_of(source) == text_of(source) == text
    assert (source.name, source.kind, source.fields) == ("standard input", "stdin", {"kind": "stdin"})
    assert source.size_bytes == len(text.encode())


@pytest.mark.parametrize(("data", "reason"), [(b"", "is empty"), (b"a\0b", "binary"), (b"d\xe9j\xe0 vu", "not utf-8")])
def test_standard_input_that_is_no_text(data: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Stdin(data))
    message = refusal("-")
    assert message.startswith("standard input ")
    assert reason in message


def test_standard_input_in_a_named_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Stdin("déjà".encode("latin-1")))
    assert text_of(find_sources(["-"], encoding="latin-1").sources[0]) == "déjà"


# -- PDF ---------------------------------------------------------------------------------------------------

PAGES = [["The first page says", "that all is well (so far)."], ["The second page disagrees."], ["The third is short."]]


def test_a_pdf_gives_its_text_page_by_page(tmp_path: Path) -> None:
    path = tmp_path / "paper.PDF"
    path.write_bytes(pdf(PAGES))
    source = find_sources([path]).sources[0]
    text = text_of(source)
    assert source.kind == "pdf"
    assert text == "".join("\n".join(lines) + "\n\n" for lines in PAGES)
    assert len(source.pages) == 3
    bounds = [*source.pages, len(text)]
    for number, lines in enumerate(PAGES):
        assert text[bounds[number] : bounds[number + 1]] == "\n".join(lines) + "\n\n"


def test_page_starts_are_those_of_the_last_reading(tmp_path: Path) -> None:
    path = tmp_path / "paper.pdf"
    path.write_bytes(pdf(PAGES))
    source = find_sources([path]).sources[0]
    text_of(source)
    once = list(source.pages)
    text_of(source)
    assert source.pages == once


def test_a_pdf_made_by_matplotlib_is_read_with_its_pages(tmp_path: Path) -> None:
    """Another producer than ours: embedded fonts, compressed streams."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_pdf import FigureCanvasPdf, PdfPages
    from matplotlib.figure import Figure

    path = tmp_path / "plot.pdf"
    with PdfPages(path) as pages:
        for word in ("lighthouse", "submarine"):
            figure = Figure()
            FigureCanvasPdf(figure)
            figure.text(0.2, 0.5, f"A page about a {word}")
            pages.savefig(figure)
    source = find_sources([path]).sources[0]
    text = text_of(source)
    first, second = text[: source.pages[1]], text[source.pages[1] :]
    assert "lighthouse" in first
    assert "submarine" not in first
    assert "submarine" in second


def test_a_scanned_pdf_says_that_it_has_no_text(tmp_path: Path) -> None:
    path = tmp_path / "scan.pdf"
    path.write_bytes(pdf([[], []]))
    assert refusal(path) == f"{path} has no text in it (scanned pages need OCR first); there is nothing to read."


def test_a_pdf_without_pages(tmp_path: Path) -> None:
    path = tmp_path / "none.pdf"
    path.write_bytes(pdf([]))
    assert str(path) in refusal(path)


def test_a_pdf_with_a_password_says_so(tmp_path: Path) -> None:
    from pypdf import PdfReader, PdfWriter

    path = tmp_path / "locked.pdf"
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf(PAGES))))
    writer.encrypt("secret", algorithm="RC4-128")
    writer.write(path)
    assert refusal(path) == f"{path} is an encrypted PDF; save a copy without the password first."


def test_a_pdf_encrypted_with_an_empty_password_is_read(tmp_path: Path) -> None:
    from pypdf import PdfReader, PdfWriter

    path = tmp_path / "printable.pdf"
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf(PAGES))))
    writer.encrypt("", "owner", algorithm="RC4-128")
    writer.write(path)
    assert "The second page disagrees." in read_one(path)


def test_a_pdf_in_a_cipher_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    """AES needs a library that is not among our dependencies; with it, the password is missing all the same."""
    zeros = "00" * 48
    aes = (
        "<< /Filter /Standard /V 5 /R 6 /Length 256 /P -4 /EncryptMetadata true "
        "/CF << /StdCF << /AuthEvent /DocOpen /CFM /AESV3 /Length 32 >> >> /StmF /StdCF /StrF /StdCF "
        f"/O <{zeros}> /U <{zeros}> /OE <{'00' * 32}> /UE <{'00' * 32}> /Perms <{'00' * 16}> >>"
    )
    path = tmp_path / "aes.pdf"
    number = 4 + 2 * len(PAGES)
    path.write_bytes(pdf(PAGES, objects=[aes], trailer=f"/Encrypt {number} 0 R /ID [<00><00>]"))
    assert str(path) in refusal(path)


@pytest.mark.parametrize("content", [b"", b"%PDF-1.7\n", b"just text\n" * 100, b"\0" * 1000, b"%PDF-1.7\n%%EOF\n"])
def test_what_is_only_called_pdf_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "no.pdf"
    path.write_bytes(content)
    assert str(path) in refusal(path)


def test_a_damaged_pdf_is_read_or_refused_but_never_crashes(tmp_path: Path) -> None:
    """300 copies with a few bytes changed, or cut short."""
    whole = pdf(PAGES)
    path = tmp_path / "damaged.pdf"
    chance = random.Random(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            read_one(path)
        except InputError as error:
            refused += 1
            assert str(path) in str(error)
            assert "\n" not in str(error)
    assert 20 < refused < 290


# -- size --------------------------------------------------------------------------------------------------

_STREAM = """
import resource, sys
from types import SimpleNamespace
from tokenizers import Tokenizer, models, pre_tokenizers
from longfocus.data.documents import find_sources
from longfocus.data.tokens import stream_tokens

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
small, large = sys.argv[1:]

def tokens(path, limit):
    source = find_sources([path]).sources[0]
    done = 0
    for piece in stream_tokens(SimpleNamespace(backend_tokenizer=backend), (text for _, text in source.blocks())):
        done += len(piece.rows)
        if done >= limit:
            return done

tokens(small, 1 << 40)
before = peak_mb()
done = tokens(large, 200_000)
print(done, peak_mb() - before)
"""


def test_a_file_of_200_mb_streams(tmp_path: Path) -> None:
    """Checked to its end and tokenised to 16 MB, it takes no more memory than one of 1 MB did (see the margin)."""
    line = b"x" * 79 + b"\n"
    (tmp_path / "small.txt").write_bytes(line * 13_000)
    with (tmp_path / "large.txt").open("wb") as file:
        for _ in range(200):
            file.write(line * 12_500)
    assert (tmp_path / "large.txt").stat().st_size == 200_000_000
    run = subprocess.run(
        [sys.executable, "-c", _STREAM, str(tmp_path / "small.txt"), str(tmp_path / "large.txt")],
        capture_output=True,
        text=True,
        check=True,
    )
    (tmp_path / "large.txt").unlink()
    done, grown_mb = run.stdout.split()
    assert int(done) >= 200_000
    assert float(grown_mb) < 16
