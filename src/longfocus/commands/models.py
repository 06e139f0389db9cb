"""Loading a model, without the chatter of the libraries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longfocus.commands.options import CLI_DEFAULTS
from longfocus.commands.output import note
from longfocus.config import WEIGHT_DTYPES
from longfocus.errors import ConfigError, MemoryMismatchError, ModelNotFoundError

if TYPE_CHECKING:
    from longfocus.memory.distributed.memory import ShardedMemory
    from longfocus.memory.memory import Memory


def settle(threads: int | None) -> None:
    """Silence the libraries' chatter and set the number of CPU threads.

    Raises:
        ConfigError: no thread is left.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"--threads: {threads} given, expected 1 or more.")
        torch.set_num_threads(threads)


def check_dtype(dtype: str | None) -> None:
    """
    Raises:
        ConfigError: weights cannot be loaded in it.
    """
    if dtype not in (None, *WEIGHT_DTYPES):
        raise ConfigError(f"--dtype: {dtype!r} given, expected one of {', '.join(WEIGHT_DTYPES)}.")


def load_model(
    source: str,
    options: dict[str, Any],
    threads: int | None,
    dtype: str | None = None,
    made_in: str | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer), without the chatter of the libraries.

    Args:
        dtype: of the weights. None: `made_in`, that of the model that made the memory; without a memory, what the
            machine is fast at, or as stored.
    """
    check_dtype(dtype)
    settle(threads)
    from longfocus.model.load import fast_dtype, load, load_tokenizer

    chosen = dtype or made_in or fast_dtype()
    return load(source, announce=note, dtype=chosen, **options), load_tokenizer(source)


def load_for(
    memory: Memory | ShardedMemory | None,
    name: str | None,
    options: dict[str, Any],
    threads: int | None,
    dtype: str | None,
) -> tuple[str, Any, Any]:
    """Name, model and tokenizer for a memory: the model that is named, else the one that made it, with the options that made
    it but for those given now.

    Args:
        memory: None: one that is new.
    """
    if memory is None:
        name = name or "default"
        return name, *load_model(name, {**CLI_DEFAULTS, **options}, threads, dtype)
    source = name or memory.model_source or "default"
    given = {**memory.focus_options, **options}
    try:
        return source, *load_model(source, given, threads, dtype, memory.geometry.model_dtype)
    except ModelNotFoundError as error:
        if name is not None:
            raise
        raise ModelNotFoundError(
            f"{error} ({memory.label} was made with it; name its new place with --model.)"
        ) from error


def lasting_source(name: str) -> str:
    """A model's name as a memory keeps it: a folder by its whole path, so that it is found from anywhere."""
    return name if name.startswith("default") or not Path(name).exists() else str(Path(name).absolute())


def warn_untrained(source: str) -> None:
    """Say so when the model never learnt to use a memory, lest its answers be taken for more than they are."""
    if source == "default-base":
        note("This model has not been trained to use its memory: trust the sources, not the answer (see README).")


@contextmanager
def hint_at_options() -> Iterator[None]:
    """While a model is compared with the memory that is added to: what to do if it is not the one that made it."""
    try:
        yield
    except MemoryMismatchError as error:
        raise MemoryMismatchError(f"{error} (Leave out the options to add with those of the memory.)") from error
