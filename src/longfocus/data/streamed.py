"""A source too large to tokenise beforehand: its documents in order, tokenised as they are asked for.

    source = StreamedSource(SourceSpec("web", kind="hub", dataset="allenai/c4", subset="en"), tokenizer)
    source.next_document()        # (id, tokens), or None once at the end of each pass

Its place is the number of files and records consumed, and with a hub data set that set's own state, so that going on
reads nothing twice there (within a file, records before the place are read but not tokenised). There is no
permutation: documents come as the source has them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from longfocus.data.corpus import Corpus, TextDocument
from longfocus.data.source_spec import SourceSpec
from longfocus.data.token_cache import token_ids
from longfocus.memory.fingerprint import tokenizer_fingerprint


class StreamedSource:
    """One reader of a source; each mixture needs its own, since it keeps the place.

    Raises:
        InputError: as `Corpus`.
    """

    documents: None = None
    """How many there are is not known."""

    def __init__(self, spec: SourceSpec, tokenizer: Any) -> None:
        self.name = spec.name
        self._tokenizer = tokenizer
        self._corpus = Corpus(spec)
        files = [[file.name, file.size_bytes] for file in self._corpus.files]
        described = [{**spec.to_dict(), "name": ""}, files, tokenizer_fingerprint(tokenizer)]
        self.digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]
        """Of how the source is read, its files' names and sizes, and the tokenizer; not of its contents."""
        self._texts: Iterator[TextDocument] | None = None

    def next_document(self) -> tuple[str, np.ndarray] | None:
        """Id and token ids, uint32 (tokens,), of the next document; None at the end, after which a pass begins anew."""
        document = self._next_text()
        if document is None:
            return None
        pieces = list(token_ids(self._tokenizer, document.text))
        return document.id, np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint32)

    def skip_document(self) -> bool:
        """Pass over a document without tokenising it; False at the end, as `next_document`."""
        return self._next_text() is not None

    def _next_text(self) -> TextDocument | None:
        if self._texts is None:
            self._texts = iter(self._corpus)
        document = next(self._texts, None)
        if document is None:
            self._texts = None
        return document

    def state_dict(self) -> dict[str, Any]:
        """The place after the last document; JSON-ready."""
        return self._corpus.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place."""
        self._corpus.load_state_dict(state)
        self._texts = None
