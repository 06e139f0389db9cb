"""Loading: the default model, a local checkpoint, a hub id, or a released LongLLaMA, attached and ready."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from longfocus.config import FocusConfig
from longfocus.errors import ConfigError, LongfocusError, ModelNotFoundError
from longfocus.model import longllama
from longfocus.model.attach import attach
from longfocus.model.default_model import BASE, FINE_TUNE, FINE_TUNE_FOCUS, FOCUS, default_model_path
from longfocus.model.default_model import NAME as DEFAULT
from longfocus.model.gates import restore_gates
from longfocus.model.weights import load_weights

ADAPTER_NOTE = "longfocus.json"
"""Beside an adapter: its base model and the options of the focused model."""


def fast_dtype(device: torch.device | str = "cpu") -> torch.dtype | None:
    """bfloat16 where the machine computes fast in it (CUDA, or a CPU with AMX or AVX512-BF16); None elsewhere."""
    if str(device) != "cpu" and torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else None


def load(
    path_or_id: str | Path = DEFAULT,
    config: FocusConfig | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    announce: Any = None,
    **options: Any,
) -> Any:
    """Load a causal language model and give it memory layers.

    Args:
        path_or_id: a folder, a hub id, "default" for the model that comes along, or "default-base" for the same
            before its fine-tune.
        config: options; None: those stored in the checkpoint, else the defaults. `options` are the same as
            keywords and change single fields.
        dtype: of the weights; default as stored (float32 for the default model).
        device: where to put the model; default CPU.
        announce: called with a line of text before something slow.

    Returns:
        The model, in evaluation mode, attached (see `attach`).

    Raises:
        ModelNotFoundError: nothing there, or weights that are no numbers.
        UnsupportedModelError, ConfigError: as `attach`.
    """
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    if (Path(path_or_id) / "adapter_config.json").is_file():
        given = {"dtype": dtype, "device": device, "announce": announce, **options}
        return _with_adapter(Path(path_or_id), config, given)
    path = resolve(path_or_id, announce)
    raw = raw_config(path)
    arguments: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    model: Any
    stored: FocusConfig | None = None
    try:
        if longllama.is_longllama(raw):
            llama, stored = longllama.read_config(raw)
            model = LlamaForCausalLM.from_pretrained(path, config=llama, **arguments)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, **arguments)
            kept = getattr(model.config, "longfocus", None)
            stored = FocusConfig.from_dict(kept) if kept else None
        restore_gates(model)
        if str(path_or_id) == BASE:
            stored = FOCUS
        if str(path_or_id) == DEFAULT:
            stored = FINE_TUNE_FOCUS
            load_weights(model, FINE_TUNE)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        if isinstance(error, LongfocusError):
            raise
        raise ModelNotFoundError(f"No usable model in {path_or_id}: {_first_line(error)}") from error
    _check_numbers(model, path_or_id)
    if device is not None:
        model = _moved(model, device)
    chosen = config or stored or FocusConfig()
    if options:
        chosen = FocusConfig.from_dict({**chosen.to_dict(), **options})
    return attach(model.eval(), chosen)


def _with_adapter(folder: Path, config: FocusConfig | None, arguments: dict[str, Any]) -> Any:
    """The base model of an adapter that `longfocus train` saved, with the adapter merged in."""
    note = folder / ADAPTER_NOTE
    if not note.is_file():
        raise ModelNotFoundError(
            f"{folder} is an adapter without {ADAPTER_NOTE}, which longfocus train writes; load its base model and use "
            "peft.PeftModel.from_pretrained."
        )
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ModelNotFoundError(f"{folder} is an adapter; to load it: pip install peft") from error
    about = json.loads(note.read_text("utf-8"))
    if config is None and "longfocus" in about:
        config = FocusConfig.from_dict(json.loads(about["longfocus"]))
    model = load(about["base"], config, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks for an attribute's old name
        merged = PeftModel.from_pretrained(model, folder).merge_and_unload().eval()
    _check_numbers(merged, folder)
    return merged


def _moved(model: Any, device: torch.device | str) -> Any:
    """
    Raises:
        ConfigError: no such device here.
    """
    try:
        return model.to(torch.device(device))
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ) as error:  # what torch raises depends on how it was built
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"device: {str(device)!r} given, but {_first_line(error)}; expected cpu, or cuda with a GPU."
        ) from error


def _check_numbers(model: Any, source: str | Path) -> None:
    """One pass over the weights; with nan among them a model answers, and every number is worthless.

    Raises:
        ModelNotFoundError: a weight is nan or infinite.
    """
    wrong = [
        name
        for name, weight in model.named_parameters()
        if weight.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        and weight.numel()
        and not torch.isfinite(torch.stack(torch.aminmax(weight.detach()))).all()
    ]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        narrow = ", or the weights need a wider dtype than float16" if model.dtype == torch.float16 else ""
        raise ModelNotFoundError(
            f"No usable model in {source}: nan or infinite numbers in {wrong[0]}{more}. The file is damaged, or its training "
            f"went astray{narrow}."
        )


def load_tokenizer(path_or_id: str | Path = DEFAULT) -> Any:
    """The tokenizer that belongs to a model; arguments and errors as `load`."""
    from transformers import AutoTokenizer

    path = resolve(path_or_id, None)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelNotFoundError(f"No usable tokenizer in {path_or_id}: {_first_line(error)}") from error


def resolve(path_or_id: str | Path, announce: Any = None) -> str:
    """What `from_pretrained` is given: the default model's folder, a local folder, or the hub id."""
    if str(path_or_id) in (DEFAULT, BASE):
        return str(default_model_path(announce))
    path = Path(path_or_id)
    if path.is_dir():
        return str(path)
    text = str(path_or_id)
    if path.exists() or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelNotFoundError(
            f"{text} is not a folder with a model; give a folder, a hub id such as org/name, or 'default'."
        )
    return text


def raw_config(path: str) -> dict[str, Any]:
    """A model's config.json as it is written; `path` as `resolve` returns it.

    Raises:
        ModelNotFoundError: nothing there, or no config.json.
    """
    from transformers import PretrainedConfig

    try:
        raw, _ = PretrainedConfig.get_config_dict(path)
    except (OSError, ValueError) as error:
        hub = "" if Path(path).is_dir() else " no such folder, and as a hub id:"
        raise ModelNotFoundError(f"No model at {path}:{hub} {_first_line(error)}") from error
    if not raw:
        raise ModelNotFoundError(f"{path} holds no config.json; it is not a model.")
    return dict(raw)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
