"""Our models inside lm-evaluation-harness, on tasks whose data lies in local files: equal to its own `hf` model where both
see the same, and with a memory beyond the window.

    python -m pytest tests/evaluation/test_lm_eval_model.py
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'longfocus[harness]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import Registry, get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from longfocus import FocusConfig, KRule, attach
from longfocus.commands.lm_eval import with_our_model
from longfocus.errors import ConfigError, UnsupportedCallError
from longfocus.evaluation.lm_eval_model import LongfocusLM
from longfocus.model.load import load_tokenizer
from tests import processes
from tests.models import MEMORY_LAYERS, tiny
from tests.small_tokenizers import VOCABULARY, talking, tokenizer

WINDOW = 32
NEAR = 1e-4
ROOT = Path(__file__).parents[2]

SENTENCES = [
    "The narrator, she said, was neither the captain nor the mate.",
    "It was getting late.",
    "She said that the mate was late; the captain was getting neither.",
    "def f(x: int) -> str: return ''",
    "Все счастливые семьи похожи друг на друга.",
]
TASKS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "tiny_choice": (
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}} ",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        [
            {"question": text, "choices": [" the captain", " late", " a"], "label": number % 3}
            for number, text in enumerate(SENTENCES)
        ]
        + [{"question": "It was", "choices": ["a", "b", "c", "d"], "label": 1}],
    ),
    "tiny_answer": (
        {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["e"], "max_gen_toks": 9},
            "metric_list": [{"metric": "exact_match"}],
        },
        [{"question": text, "answer": text} for text in SENTENCES],
    ),
    "tiny_text": (
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        [{"text": text} for text in SENTENCES],
    ),
    "tiny_long": (
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}} It was",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc"}],
        },
        [{"text": f"{first} " + " ".join(SENTENCES[:3]) * 2, "choices": [" late", " a"], "label": 0} for first in "AB"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks as users write them, and a small checkpoint with memory layers."""
    made = tmp_path_factory.mktemp("harness")
    for name, (fields, documents) in TASKS.items():
        data = made / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents), "utf-8")
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (made / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **where, **fields}), "utf-8")
    words = talking("chat")
    model = tiny("llama", vocab_size=VOCABULARY, eos_token_id=words.eos_token_id)
    attach(model, FocusConfig(memory_layers=MEMORY_LAYERS, window=WINDOW)).save_pretrained(made / "model")
    words.save_pretrained(made / "model")
    return made


def measured(lm: Any, folder: Path, *tasks: str, **options: Any) -> Any:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(model=lm, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options)


def answers(results: Any, task: str) -> list[Any]:
    """All that the model said, sample by sample: log-likelihoods, or texts."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for responses in sample["resps"] for response in responses]


def assert_alike(one: Any, other: Any, tasks: tuple[str, ...]) -> None:
    for task in tasks:
        mine, expected = answers(one, task), answers(other, task)
        assert len(mine) == len(expected) > 0
        for found, wanted in zip(mine, expected, strict=True):
            if isinstance(wanted, tuple):
                assert found[0] == pytest.approx(wanted[0], abs=NEAR), task
                assert found[1] == wanted[1], task
            else:
                assert found == (wanted if isinstance(wanted, str) else pytest.approx(wanted, abs=NEAR)), task
        for name, value in other["results"][task].items():
            if isinstance(value, float):
                assert one["results"][task][name] == pytest.approx(value, rel=NEAR), (task, name)


SHORT = ("tiny_choice", "tiny_answer", "tiny_text")


def hf(kind: str = "byte_level", family: str = "llama", **options: Any) -> Any:
    return HFLM(pretrained=tiny(family, vocab_size=VOCABULARY), tokenizer=tokenizer(kind), **options)


def ours(kind: str = "byte_level", family: str = "llama", focus: dict[str, Any] | None = None, **options: Any) -> Any:
    model: Any = tiny(family, vocab_size=VOCABULARY)
    if focus is not None:
        model = attach(model, FocusConfig(**{"memory_layers": MEMORY_LAYERS, **focus}))
    return LongfocusLM(model, tokenizer=tokenizer(kind), **options)


@pytest.mark.parametrize(
    ("kind", "family", "batch_size"),
    [("byte_level", "llama", 1), ("metaspace", "llama", 4), ("byte_level", "gemma2", 3)],
)
def test_plain_and_focused_inside_one_window_give_the_numbers_of_the_harness_own_model(
    folder: Path, kind: str, family: str, batch_size: int
) -> None:
    expected = measured(hf(kind, family), folder, *SHORT)
    assert len(set(answers(expected, "tiny_answer"))) > 1
    plain = ours(kind, family, batch_size=batch_size)
    assert_alike(measured(plain, folder, *SHORT), expected, SHORT)
    focused = ours(kind, family, focus={"window": 512}, batch_size=batch_size)
    found = measured(focused, folder, *SHORT)
    assert_alike(found, expected, SHORT)
    counts = found["config"]["longfocus"]["requests"]
    assert counts["requests"] == 5 * 3 + 4 + 5 + 5
    assert (counts["beyond_window"], counts["truncated"]) == (0, 0)


def test_short_windows_of_a_rolling_text_are_those_of_the_harness(folder: Path) -> None:
    expected = measured(hf(max_length=7), folder, "tiny_text")
    for lm in (ours(max_length=7), ours(max_length=7, focus={"window": 32})):
        assert_alike(measured(lm, folder, "tiny_text"), expected, ("tiny_text",))


def test_too_long_requests_are_refused_before_anything_is_computed(folder: Path) -> None:
    for task, what in (("tiny_choice", "request"), ("tiny_answer", "prompt with its answer")):
        lm = ours(max_length=12)
        lm.model.forward = None  # whatever calls it fails otherwise
        with pytest.raises(UnsupportedCallError, match=rf"requests are too long: the longest {what}.*truncation=true"):
            measured(lm, folder, task)


def test_cutting_from_the_left_is_what_the_harness_does_and_is_counted(folder: Path) -> None:
    tasks = ("tiny_choice", "tiny_answer")
    expected = measured(hf(max_length=12), folder, *tasks)
    found = measured(ours(max_length=12, truncation=True), folder, *tasks)
    assert_alike(found, expected, tasks)
    counts = found["config"]["longfocus"]["requests"]
    assert counts["longest_tokens"] == 12
    whole = measured(ours(), folder, *tasks)
    different = [
        one != other for task in tasks for one, other in zip(answers(found, task), answers(whole, task), strict=True)
    ]
    assert 0 < counts["truncated"] < counts["requests"] == 24
    assert 0 < sum(different) <= counts["truncated"]
    with pytest.raises(UnsupportedCallError, match="even without what could be cut"):
        measured(ours(max_length=9, truncation=True), folder, "tiny_answer")


def test_max_length_may_exceed_what_the_positions_cover(folder: Path) -> None:
    model = tiny("llama", vocab_size=VOCABULARY, max_position_embeddings=16)
    assert LongfocusLM(model, tokenizer=tokenizer("byte_level")).max_length == 16
    lm = LongfocusLM(model, tokenizer=tokenizer("byte_level"), max_length="1k")
    assert lm.max_length == 1024
    assert_alike(measured(lm, folder, "tiny_choice"), measured(hf(), folder, "tiny_choice"), ("tiny_choice",))


# -- memory ------------------------------------------------------------------------------------------------


def test_what_does_not_fit_the_window_goes_to_the_memory(folder: Path) -> None:
    """The two samples differ in their first letter only, many windows before the question."""
    tasks = ("tiny_long",)
    with_memory = measured(ours(focus={"window": WINDOW}), folder, *tasks)
    without = measured(ours(focus={"window": WINDOW, "memory_layers": ()}), folder, *tasks)
    plain = measured(ours(), folder, *tasks)
    first, second = answers(with_memory, "tiny_long")[:2], answers(with_memory, "tiny_long")[2:]
    assert all(abs(a[0] - b[0]) > 1e-4 for a, b in zip(first, second, strict=True))
    assert answers(without, "tiny_long")[:2] == answers(without, "tiny_long")[2:]
    assert all(
        abs(a[0] - b[0]) > 1e-3
        for a, b in zip(answers(plain, "tiny_long"), answers(with_memory, "tiny_long"), strict=True)
    )
    counts = with_memory["config"]["longfocus"]["requests"]
    assert counts["beyond_window"] == counts["requests"] == 4
    assert counts["longest_tokens"] > 2 * WINDOW


@pytest.mark.parametrize("batch_size", [2, 8])
def test_batches_give_what_single_requests_give_on_either_side_of_the_window(folder: Path, batch_size: int) -> None:
    tasks = (*SHORT, "tiny_long")
    one = measured(ours(focus={"window": 16}), folder, *tasks)
    assert (
        0 < one["config"]["longfocus"]["requests"]["beyond_window"] < one["config"]["longfocus"]["requests"]["requests"]
    )
    assert_alike(measured(ours(focus={"window": 16}, batch_size=batch_size), folder, *tasks), one, tasks)


def test_answers_to_long_prompts_are_those_of_generate(folder: Path) -> None:
    lm = ours(focus={"window": 16})
    prompts = ["It was getting late. " * 9, "a"]
    kwargs = {"until": ["\n\n"], "max_gen_toks": 12}
    requests = [Instance("generate_until", {}, (prompt, kwargs), number) for number, prompt in enumerate(prompts)]
    found = lm.generate_until(requests, disable_tqdm=True)
    for prompt, text in zip(prompts, found, strict=True):
        ids = lm.tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = lm.model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert text == lm.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).split("</s>")[0]
    assert lm.counts["beyond_window"] == 1


def test_a_cache_of_answers_is_filled_and_used(folder: Path, tmp_path: Path) -> None:
    where = str(tmp_path / "cache")
    first = measured(ours(), folder, *SHORT, use_cache=where)
    lm = ours()
    lm.model.forward = lm.model.generate = None  # whatever calls them fails
    assert_alike(measured(lm, folder, *SHORT, use_cache=where), first, SHORT)


# -- names and options -------------------------------------------------------------------------------------


def test_the_entry_point_names_the_registered_class() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]["lm_eval.models"]
    assert points == {"longfocus": f"{LongfocusLM.__module__}:{LongfocusLM.__qualname__}"}
    assert get_model("longfocus") is LongfocusLM
    registry: Any = Registry("model")
    registry.register("longfocus", target=points["longfocus"])  # as a discovered plug-in is registered
    registry.register("longfocus")(LongfocusLM)
    assert registry.get("longfocus") is LongfocusLM


def test_arguments_as_the_harness_hands_them_on(folder: Path) -> None:
    text = f"pretrained={folder / 'model'},memory_layers=0+2+3,window=24,dtype=bfloat16,max_length=2k"
    lm = LongfocusLM.create_from_arg_string(text, {"batch_size": 2, "device": "cuda:0" if _no_gpu() else "cpu"})
    config = lm.model.focus.config
    assert (config.layers, config.window_tokens, lm.batch_size, lm.max_length) == ((0, 2, 3), 24, 2, 2048)
    assert str(lm.model.dtype) == "torch.bfloat16"
    assert str(lm.device) == "cpu"
    plain = LongfocusLM.create_from_arg_obj({"pretrained": str(folder / "model"), "plain": True})
    assert not hasattr(plain.model, "focus")
    assert plain.max_length == 2048
    assert LongfocusLM(str(folder / "model"), memory_layers=1).model.focus.config.layers == (1,)
    assert LongfocusLM(str(folder / "model")).model.focus.config.layers == MEMORY_LAYERS
    rule = KRule(least_share=0.01)
    rule.write(folder / "rule.json")
    text = f"pretrained={folder / 'model'},retrieval=exact,k_rule={folder / 'rule.json'}"
    assert LongfocusLM.create_from_arg_string(text).model.focus.config.k_rule == rule


def _no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": "auto"}, "batch_size: 'auto'"),
        ({"batch_size": 0}, "batch_size: 0"),
        ({"memory_layer": 3}, "'memory_layer' is not known. Did you mean 'memory_layers'"),
        ({"trust_remote_code": True}, "'trust_remote_code' is not known"),
        ({"memory_layers": "6,7"}, "expected numbers such as 6\\+17"),
        ({"max_length": "long"}, "'long' given, expected a size"),
        ({"plain": True, "window": 32}, "window: a plain model has no memory"),
        ({"dtype": "int8"}, "'int8' given"),
    ],
)
def test_impossible_arguments_are_refused(folder: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LongfocusLM(str(folder / "model"), **given)


def test_a_loaded_model_needs_its_tokenizer_and_takes_no_options_of_loading() -> None:
    model = tiny("llama", vocab_size=VOCABULARY)
    for given, message in (
        ({}, "tokenizer: missing"),
        ({"tokenizer": tokenizer("byte_level"), "window": 8, "dtype": "float32"}, "dtype, window: the model is loaded"),
    ):
        with pytest.raises(ConfigError, match=message):
            LongfocusLM(model, **given)
    with pytest.raises(ConfigError, match="has memory layers"):
        LongfocusLM(attach(model, FocusConfig(memory_layers=(1,))), tokenizer=tokenizer("byte_level"), plain=True)


def test_chat_templates(folder: Path) -> None:
    history = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}]
    lm = LongfocusLM(tiny("llama", vocab_size=VOCABULARY), tokenizer=talking("no_system"))
    assert lm.apply_chat_template(history) == "<s>[user]\nHello?</s>\n[model]\n"
    begun = [*history[1:], {"role": "assistant", "content": "Well"}]
    assert lm.apply_chat_template(begun, add_generation_prompt=False).endswith("[model]\nWell")
    ids = lm.tok_encode(lm.apply_chat_template(history))
    assert ids.count(lm.tokenizer.bos_token_id) == 1
    results = measured(LongfocusLM(str(folder / "model")), folder, "tiny_answer", apply_chat_template=True)
    prompt = results["samples"]["tiny_answer"][0]["arguments"][0][0]
    assert prompt.startswith("[system]\nBe brief.</s>\n[user]\n")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        (["run"], ["run"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        (["--tasks", "a"], ["--tasks", "a", "--model", "longfocus"]),
        (["run", "--tasks", "a"], ["run", "--tasks", "a", "--model", "longfocus"]),
        (["--model", "hf", "--tasks", "a"], ["--model", "hf", "--tasks", "a"]),
        (["--model=hf"], ["--model=hf"]),
        (["-M", "hf"], ["-M", "hf"]),
        (["--config", "a.yaml"], ["--config", "a.yaml"]),
        (["run", "--help"], ["run", "--help"]),
        (["--model_args", "pretrained=a"], ["--model_args", "pretrained=a", "--model", "longfocus"]),
    ],
)
def test_the_command_adds_our_model_where_none_is_named(given: list[str], expected: list[str]) -> None:
    assert with_our_model(given) == expected


# -- real processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_runs_tasks_with_a_memory_and_without(folder: Path, tmp_path: Path) -> None:
    found = {}
    for name, more in (("memory", ",window=64"), ("plain", ",plain=true")):
        ended = processes.run(
            "tests.commands.children:longfocus",
            *("lm-eval", "--model_args", f"pretrained={folder / 'model'}{more}"),
            *("--tasks", "tiny_choice,tiny_long", "--include_path", str(folder), "--batch_size", "2"),
            *("--output_path", str(tmp_path / name), "--log_samples", "--device", "cpu"),
        )
        assert ended.code == 0, ended.err
        assert "tiny_choice" in ended.out
        assert "|acc" in ended.out
        (path,) = (tmp_path / name).rglob("results_*.json")
        found[name] = json.loads(path.read_text("utf-8"))
        assert found[name]["config"]["model"] == "longfocus"
    expected = measured(LongfocusLM(str(folder / "model")), folder, "tiny_choice")["results"]["tiny_choice"]
    for results in found.values():
        assert results["results"]["tiny_choice"]["acc,none"] == expected["acc,none"]
    memory, plain = (found[name]["config"]["longfocus"] for name in ("memory", "plain"))
    assert (memory["kind"], plain["kind"]) == ("focused", "plain")
    assert memory["requests"]["beyond_window"] == 4  # those of tiny_long
    assert plain["requests"]["beyond_window"] == 0


def test_a_mistake_is_one_line_and_exit_code_2(folder: Path) -> None:
    ended = processes.run(
        "tests.commands.children:longfocus",
        *("lm-eval", "--model_args", f"pretrained={folder / 'model'},windw=8"),
        *("--tasks", "tiny_choice", "--include_path", str(folder)),
    )
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("longfocus: model_args: 'windw' is not known. Did you mean 'window'?")
    assert "Traceback" not in ended.err


def test_without_the_harness_the_message_says_what_to_install() -> None:
    ended = processes.run("tests.evaluation.test_lm_eval_model:command_without_lm_eval")
    assert ended.code == 2
    assert ended.err == "longfocus: lm-evaluation-harness is not installed: pip install 'longfocus[harness]'\n"
    ended = processes.run("tests.evaluation.test_lm_eval_model:import_without_lm_eval")
    assert ended.code == 0, ended.err
    assert "pip install 'longfocus[harness]'" in ended.out


def command_without_lm_eval() -> None:
    """In a process of its own."""
    from longfocus.cli import main

    _hide()
    sys.argv = ["longfocus", "lm-eval", "--tasks", "hellaswag"]
    main()


def import_without_lm_eval() -> None:
    """In a process of its own."""
    _hide()
    try:
        import longfocus.evaluation.lm_eval_model  # noqa: F401
    except ConfigError as error:
        print(error)


def _hide() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval" or name.endswith("lm_eval_model")]:
        del sys.modules[name]
    sys.modules["lm_eval"] = None  # type: ignore[assignment]


def test_tokenizers_load_by_name(folder: Path) -> None:
    lm = LongfocusLM(tiny("llama", vocab_size=VOCABULARY), tokenizer=str(folder / "model"))
    assert lm.tok_encode("It was late") == load_tokenizer(folder / "model").encode("It was late")
    assert lm.tokenizer_name
