"""How memory records are written: int8 takes half of float16, reads back as documented, and nothing else changes.

Shows: stored bytes read as docs/formats.md says, by a reader of its own in numpy float64; the error of each number is
bounded; the same bits however a text is cut, in RAM and on disk, merged, copied, cropped; dense and top-k attention are
attention over the numbers that were read back, in every row of a batch; a question does not spoil the next (CASES 23);
other dtypes are refused with the reason.

    python -m pytest tests/memory/test_storage.py
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longfocus import FocusConfig, Memory, attach, read_ids
from longfocus.config import MEMORY_DTYPES
from longfocus.errors import ConfigError, MemoryFormatError, MemoryMismatchError, UnsupportedCallError
from longfocus.memory.context import MemoryContext, Part
from longfocus.memory.contract import CHUNK_TOKENS
from longfocus.memory.dense import Scratch
from longfocus.memory.documents import TOKEN_DTYPE
from longfocus.memory.manifest import checksum
from longfocus.memory.ram import RamStore
from longfocus.memory.storage import STORAGE_DTYPES, storage_dtype
from tests.memory.saved import WINDOW, assert_same, focused, held, in_ram, read, tokenizer_of_these_tests
from tests.models import VOCABULARY, assert_close, logits, tiny, tokens

INT8 = STORAGE_DTYPES["int8"]
EXACT = 1e-12  # float64, sums over a few hundred keys
SCALE = 0.4
LAYERS = (1, 2)


def documented(stored: np.ndarray) -> np.ndarray:
    """float64 numbers of int8 vectors (…, D), as docs/formats.md writes it."""
    code = (stored[..., :8] & 1) @ (1 << np.arange(8))
    scale = np.where(code == 255, np.nan, np.float32(2.0 ** ((code - 176) / 8)))
    return stored * scale[..., None].astype(np.float64)


def steps(stored: Tensor) -> Tensor:
    """The scale of each vector (…, 1)."""
    code = ((stored[..., :8].numpy() & 1) << np.arange(8)).sum(-1)
    return torch.from_numpy(2.0 ** ((code - 176) / 8)).unsqueeze(-1)


def decoded(stored: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    out = torch.full(stored.shape, torch.nan, dtype=dtype)
    INT8.decode_into(out, stored)
    return out


# -- the form ----------------------------------------------------------------------------------------------


def test_every_option_is_a_storage_dtype_of_its_name() -> None:
    assert set(MEMORY_DTYPES) == set(STORAGE_DTYPES) - {"float64"}
    assert all(storage.name == name for name, storage in STORAGE_DTYPES.items())


@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 128])
def test_int8_takes_half_of_float16_scales_included(head_dim: int) -> None:
    written = INT8.store(torch.randn(3, head_dim))
    assert INT8.bytes(head_dim) == written[0].nbytes == STORAGE_DTYPES["float16"].bytes(head_dim) / 2


@given(
    head_dim=st.sampled_from([8, 16, 64]),
    size=st.floats(-25, 15),
    tail=st.floats(0, 4),
    source=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=100)
def test_the_first_eight_numbers_are_off_by_a_step_at_most_and_the_others_by_half(
    head_dim: int, size: float, tail: float, source: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(50, head_dim, generator=generator, dtype=torch.float64)
    vectors = vectors * torch.exp(tail * torch.randn(50, head_dim, generator=generator, dtype=torch.float64))
    vectors = (vectors / vectors.abs().amax() * 2.0**size).to(source)
    vectors[3] = 0
    stored = INT8.store(vectors)
    back, step = decoded(stored), steps(stored)
    assert np.array_equal(back.numpy(), documented(stored.numpy()))
    wrong = (back - vectors.double()).abs() / step
    assert wrong[:, :8].max() <= 1 + 1e-5, "first eight"
    assert head_dim == 8 or wrong[:, 8:].max() <= 0.5 + 1e-5, "others"  # x / scale is rounded in float32
    largest = vectors.double().abs().amax(-1, keepdim=True)
    assert (step * 127 * (1 + 1e-6) >= largest).all(), "a scale that is too small"
    assert (step <= torch.clamp(largest / 127 * 2 ** (1 / 8), min=2.0**-22) * (1 + 1e-6)).all(), "one that is too large"
    assert (back[3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reading_rounds_once(dtype: torch.dtype) -> None:
    """Also in half precision: not the scale first and then the product, which would pull a whole vector to one side."""
    stored = INT8.store(torch.randn(500, 2, 3, 16))
    exact = torch.from_numpy(documented(stored.numpy()))
    assert torch.equal(decoded(stored, dtype), exact.to(torch.float32).to(dtype))


def test_a_vector_that_does_not_fit_is_not_a_number_and_spoils_no_other() -> None:
    vectors = torch.randn(6, 16)
    vectors[1, 3], vectors[2, 12], vectors[3, 0], vectors[4, 9] = torch.nan, torch.inf, -torch.inf, 2e5
    back = decoded(INT8.store(vectors))
    assert back[1:5].isnan().all()
    assert torch.equal(back[[0, 5]], decoded(INT8.store(vectors[[0, 5]])))
    assert 109_000 < INT8.largest < 110_000
    assert decoded(INT8.store(torch.full((1, 8), INT8.largest))).isfinite().all()


def test_views_are_read_as_they_lie() -> None:
    """Keys and values are strided views of records."""
    stored = INT8.store(torch.randn(2, 10, 2, 3, 16))
    for kind in (0, 1):
        view = stored[:, 3:9, kind].transpose(1, 2)
        assert np.array_equal(decoded(view).numpy(), documented(view.numpy()))


# -- stores ------------------------------------------------------------------------------------------------


def _records(rows: int, count: int, seed: int = 0) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {layer: 2 * torch.randn(rows, count, 2, 2, 8, generator=generator, dtype=torch.float64) for layer in LAYERS}


def _store(records: dict[int, Tensor], cuts: list[int], mask: np.ndarray | None = None, block: int = 7) -> RamStore:
    rows, count = records[LAYERS[0]].shape[:2]
    store = RamStore(LAYERS, 2, 8, INT8, rows=rows, block_tokens=block)
    for low, high in zip([0, *cuts], [*cuts, count], strict=True):
        piece = {layer: kv[:, low:high] for layer, kv in records.items()}
        store.append(piece, None if mask is None else mask[:, low:high])
    return store


def _stored(store: RamStore, layer: int) -> Tensor:
    return torch.cat([chunk.records for chunk in store.chunks(layer) if chunk.records is not None], 1)


@given(
    count=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    kept=st.integers(0, 40),
    block=st.integers(1, 16),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_the_same_bits_however_it_is_cut_and_after_going_back(
    count: int, cuts: list[int], kept: int, block: int, seed: int
) -> None:
    records = _records(1, count, seed)
    whole = _store(records, [], block=64)
    pieces = _store(records, sorted(min(cut, count) for cut in cuts), block=block)
    assert pieces.nbytes == count * len(LAYERS) * 2 * 2 * 8
    kept = min(kept, count)
    pieces.rewind(kept)
    pieces.append({layer: kv[:, kept:] for layer, kv in records.items()})
    for layer in LAYERS:
        assert torch.equal(_stored(pieces, layer), _stored(whole, layer))
        assert torch.equal(_stored(whole, layer), INT8.store(records[layer]))


def test_stored_records_are_taken_as_they_are() -> None:
    first = _store(_records(1, 30), [])
    second = RamStore(LAYERS, 2, 8, INT8)
    second.append({layer: _stored(first, layer) for layer in LAYERS})
    assert all(torch.equal(_stored(second, layer), _stored(first, layer)) for layer in LAYERS)


def _explicit(query: Tensor, stored: Tensor, mask: np.ndarray | None, k: int | None) -> tuple[Tensor, Tensor]:
    """Attention over what docs/formats.md reads, query by query."""
    numbers = torch.from_numpy(documented(stored.numpy())).expand(query.shape[0], -1, -1, -1, -1)
    groups = query.shape[1] // numbers.shape[3]
    keys, values = (numbers[:, :, kind].transpose(1, 2).repeat_interleave(groups, 1) for kind in (0, 1))
    scores = SCALE * torch.einsum("bhtd,bhnd->bhtn", query, keys)
    if mask is not None:
        scores = scores.masked_fill(~torch.from_numpy(mask)[:, None, None], -torch.inf)
    if k is not None and k < scores.shape[-1]:
        kept = torch.zeros_like(scores, dtype=torch.bool)
        kept.scatter_(-1, scores.argsort(-1, descending=True)[..., :k], True)
        scores = scores.masked_fill(~kept, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ values, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("retrieval", ["dense", "exact"])
@pytest.mark.parametrize("rows", ["shared", "own", "own, masked", "own, near"])
def test_attention_is_over_the_numbers_that_were_read_back(rows: str, retrieval: str) -> None:
    """Float64; two layers and several chunks of uneven sizes through one scratch buffer."""
    count, k, span = 40, 6, 11
    many = 1 if rows == "shared" else 3
    mask = None
    if "," in rows:
        mask = np.random.default_rng(0).random((3, count)) < 0.6
        mask[1] = False
    store = _store(_records(many, count), [5, 6, 31], mask=mask, block=9)
    near = span if rows == "own, near" else None
    part = Part(store)
    shared, own = (part, None) if rows == "shared" else (None, part)
    context = MemoryContext(shared, own, retrieval=retrieval, k=k, scratch=Scratch(), span=near)
    if near is not None and mask is not None:
        from_end = np.cumsum(mask[:, ::-1], 1)[:, ::-1]
        mask = mask & (from_end <= near)
    for layer in (*LAYERS, *LAYERS):
        query = 2 * torch.randn(3, 6, 5, 8, dtype=torch.float64)
        found = context.attend(layer, query, scale=SCALE, softcap=None)
        assert found is not None
        out, lse = _explicit(query, _stored(store, layer), mask, k if retrieval == "exact" else None)
        assert_close(found[0], out, EXACT, "out")
        finite = lse.isfinite()
        assert torch.equal(found[1].isfinite(), finite)
        assert_close(found[1][finite], lse[finite], EXACT, "lse")


def test_gradients_reach_the_query() -> None:
    store = _store(_records(1, 40), [13])
    start = torch.randn(2, 6, 5, 8, dtype=torch.float64)
    gradients = []
    for explicit in (False, True):
        query = start.clone().requires_grad_()
        context = MemoryContext(Part(store), None, retrieval="dense", k=1, scratch=Scratch())
        found = (
            _explicit(query, _stored(store, 1), None, None)
            if explicit
            else context.attend(1, query, scale=SCALE, softcap=None)
        )
        assert found is not None
        (found[0].sin().sum() + found[1].sin().sum()).backward()
        assert query.grad is not None
        gradients.append(query.grad)
    assert_close(gradients[0], gradients[1], EXACT, "gradient of query")


# -- memories ----------------------------------------------------------------------------------------------


def test_a_memory_takes_half_the_bytes_in_ram_and_on_disk(texts: list[Path], tmp_path: Path) -> None:
    sizes = {}
    for dtype in ("float16", "int8"):
        model = focused(memory_dtype=dtype)
        memory = in_ram(model, *texts)
        memory.save(tmp_path / dtype, model=model)
        files = [path.stat().st_size for path in (tmp_path / dtype).glob("kv-*.bin")]
        assert (
            sum(files) == memory.nbytes == memory.store.nbytes == memory.tokens * model.focus.geometry.bytes_per_token
        )
        sizes[dtype] = memory.nbytes
    assert 2 * sizes["int8"] == sizes["float16"] > 0


def test_another_program_reads_the_files_as_documented(texts: list[Path], tmp_path: Path) -> None:
    model, exact = focused(memory_dtype="int8"), focused(memory_dtype="float32")
    in_ram(model, texts[1]).save(tmp_path / "memory")
    made = json.loads((tmp_path / "memory/memory.json").read_text())["geometry"]
    assert made["dtype"] == "int8"
    shape = (-1, 2, made["kv_heads"], made["head_dim"])
    first = made["layers"][0]  # no memory below it: its keys and values are those of any other dtype
    numbers = documented(np.fromfile(tmp_path / f"memory/kv-{first:03d}.1.bin", "int8").reshape(shape))
    records = held(in_ram(exact, texts[1])).records[first].double().numpy()
    step = np.abs(records).max(-1, keepdims=True) / 127 * 2 ** (1 / 8)
    assert numbers.shape == records.shape
    assert (np.abs(numbers - records) <= step * (1 + 1e-5)).all()
    assert np.abs(numbers - records).max() > 0


def test_logits_are_the_same_bits_in_ram_and_on_disk_over_several_chunks(tmp_path: Path) -> None:
    model = focused(memory_dtype="int8")
    generator = torch.Generator().manual_seed(3)
    memory = Memory(model)
    document = memory.begin_document("records", kind="ids")
    for count in (1, 100, 5000, 3899):
        rows = np.zeros(count, dtype=TOKEN_DTYPE)
        memory.store.append({layer: torch.randn(1, count, 2, 2, 8, generator=generator) for layer in LAYERS})
        document = memory.commit_window(document, rows, b"", 0)
    memory.save(tmp_path / "memory")
    ids = tokens(1, 11)
    with Memory.open(tmp_path / "memory") as disk, torch.no_grad():
        for retrieval in ("dense", "exact"):
            reader = focused(memory_dtype="int8", retrieval=retrieval, k=9)
            cache = reader.new_cache(disk)
            on_disk = reader(ids, cache=cache).logits
            assert torch.equal(on_disk, logits(reader, ids, memory=memory))
            buffers = cache._scratch._buffers.values()
            assert 0 < max(buffer.numel() for buffer in buffers) <= CHUNK_TOKENS * 2 * 2 * 8, "one chunk at a time"


def test_documents_of_other_memories_are_copied_as_they_are(texts: list[Path], tmp_path: Path) -> None:
    model = focused(memory_dtype="int8")
    parts = [in_ram(model, path) for path in texts]
    both = in_ram(model, *texts)
    merged = Memory.merge(parts, model, tokenizer_of_these_tests())
    assert_same(held(merged), held(both))
    with Memory.create(tmp_path / "memory", model, tokenizer_of_these_tests()) as disk:
        read(model, disk, texts[0])
        disk.extend(parts[1])
        assert_same(held(disk), held(both))


def test_a_third_question_gets_the_answer_of_a_fresh_memory(texts: list[Path], tmp_path: Path) -> None:
    """CASES 23: a quantised cache fails from the second question on. Long answers, that slide into own memory."""
    model = focused(memory_dtype="int8")
    vocabulary = model.config.vocab_size
    questions = [3 + torch.arange(size).unsqueeze(0) * 7 % (vocabulary - 3) for size in (9, 5 * WINDOW, 13)]

    def answer(memory: Memory, ids: Tensor) -> tuple[Tensor, Tensor]:
        made = model.generate(ids, memory=memory, max_new_tokens=3 * WINDOW, do_sample=False, pad_token_id=0)
        return made, logits(model, made, memory=memory)

    ram = in_ram(model, *texts)
    ram.save(tmp_path / "memory")
    with Memory.open(tmp_path / "memory") as disk:
        for memory in (ram, disk):
            before = held(memory)
            *_, third = [answer(memory, ids) for ids in questions]
            assert_same(held(memory), before)
            fresh = answer(in_ram(model, *texts), questions[2])
            assert torch.equal(third[0], fresh[0])
            assert torch.equal(third[1], fresh[1])


def test_rows_of_a_padded_batch_answer_as_they_do_alone() -> None:
    """Rows that slide into memories of their own, at different times. Float64, so that no code is rounded otherwise."""
    model = attach(tiny("llama", dtype=torch.float64), memory_layers=LAYERS, window=WINDOW, memory_dtype="int8")
    memory = Memory(model)
    read_ids(model, tokens(1, 50, seed=7), memory)
    sizes = (3, WINDOW - 1, 2 * WINDOW + 5, 70)
    prompts = [tokens(1, size, seed=size) for size in sizes]
    ids, mask = torch.zeros(4, 70, dtype=torch.long), torch.zeros(4, 70, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 70 - prompt.shape[1] :], mask[row, 70 - prompt.shape[1] :] = prompt, 1
    more = tokens(1, 2 * WINDOW, seed=9).expand(4, -1)
    with torch.no_grad():
        cache = model.new_cache(memory)
        together = model(ids, attention_mask=mask, cache=cache, logits_to_keep=1).logits
        after = _feed(model, more, cache)
        for row, prompt in enumerate(prompts):
            own = model.new_cache(memory)
            alone = model(prompt, cache=own, logits_to_keep=1).logits
            assert_close(together[row, -1], alone[0, -1], 1e-9, f"prompt of {sizes[row]}")
            assert_close(after[row], _feed(model, more[:1], own)[0], 1e-9, f"after the prompt of {sizes[row]}")


def _feed(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Logits of tokens fed one by one, as in generation."""
    return torch.cat([model(ids[:, at : at + 1], cache=cache).logits for at in range(ids.shape[1])], 1)


def test_a_copied_cache_goes_on_by_itself() -> None:
    model = focused(memory_dtype="int8")
    first, second, third = (tokens(1, 3 * WINDOW, seed=seed) for seed in (1, 2, 3))
    with torch.no_grad():
        cache = model.new_cache()
        model(first, cache=cache)
        twin = copy.deepcopy(cache)
        model(second, cache=twin)
        found = model(third, cache=cache).logits
        fresh = model.new_cache()
        model(first, cache=fresh)
        assert torch.equal(found, model(third, cache=fresh).logits)
        reordered = copy.deepcopy(cache)
        reordered.batch_select_indices(torch.tensor([0, 0]))
        rows = model(second.expand(2, -1), cache=reordered).logits
        assert torch.equal(rows[0], rows[1])
        assert_close(rows[:1], model(second, cache=cache).logits, 1e-4, "after repeating the row")


def test_a_memory_in_int8_is_close_to_one_in_float32() -> None:
    """The same prompt after 400 remembered tokens: far closer than without a memory."""
    ids, question = tokens(1, 400, seed=4), tokens(1, 10, seed=5)
    found = {}
    for dtype in ("float32", "int8"):
        model = attach(tiny("llama"), memory_layers=LAYERS, window=WINDOW, memory_dtype=dtype)
        memory = Memory(model)
        read_ids(model, ids, memory)
        found[dtype] = logits(model, question, memory=memory)
        found["none"] = logits(model, question)
    moved = (found["float32"] - found["none"]).norm()
    assert 0 < (found["int8"] - found["float32"]).norm() < 0.1 * moved


# -- refused -----------------------------------------------------------------------------------------------


def test_an_unknown_dtype_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"memory_dtype: 'int4' given, expected one of float32, float16, bfloat16, int8"
    ):
        FocusConfig(memory_dtype="int4")
    with pytest.raises(ValueError, match="'int4' is not one of"):
        storage_dtype("int4")


def test_heads_that_are_no_multiple_of_eight_are_refused() -> None:
    model = tiny("llama", head_dim=12)
    with pytest.raises(ConfigError, match=r"memory_dtype: int8 needs heads of a multiple of 8 .* have 12; use float16"):
        attach(model, memory_layers=(1,), window=16, memory_dtype="int8")
    attach(model, memory_layers=(1,), window=16, memory_dtype="float16")


@pytest.mark.parametrize(("made", "now"), [("int8", "float16"), ("float32", "int8")])
def test_a_memory_of_another_dtype_is_refused(made: str, now: str, texts: list[Path], tmp_path: Path) -> None:
    memory = in_ram(focused(memory_dtype=made), texts[1])
    memory.save(tmp_path / "memory")
    model = focused(memory_dtype=now)
    reason = rf"differs in the storage dtype \(made with {made}, now {now}\)"
    with pytest.raises(MemoryMismatchError, match=reason):
        Memory.open(tmp_path / "memory", model=model)
    with pytest.raises(MemoryMismatchError, match=reason):
        model(tokens(1, 5), memory=memory)
    with pytest.raises(MemoryMismatchError, match=reason):
        Memory(model).extend(memory)


def test_a_saved_memory_of_a_dtype_that_is_not_known_says_so(texts: list[Path], tmp_path: Path) -> None:
    in_ram(focused(memory_dtype="int8"), texts[1]).save(tmp_path / "memory")
    path = tmp_path / "memory/memory.json"
    manifest = json.loads(path.read_text())
    manifest["geometry"]["dtype"] = "int3"
    manifest["crc"] = checksum(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(MemoryFormatError, match=re.escape("the storage dtype 'int3' is not one of float32")):
        Memory.open(tmp_path / "memory")


def test_a_number_that_int8_cannot_hold_is_an_error_and_not_a_nan_later() -> None:
    model = attach(tiny("llama"), memory_layers=(1,), window=8, memory_dtype="int8")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e6)
    memory = Memory(model)
    with pytest.raises(UnsupportedCallError, match=r"int8 holds numbers up to 109,.*use bfloat16 or float32"):
        read_ids(model, torch.randint(3, VOCABULARY, (30,)), memory)
    assert memory.tokens == 0
