"""Does the default model find a number in a long text: with its own full attention, and with a memory?

    python benchmarks/passkey.py                       # about 5 minutes on 2 cores
    python benchmarks/passkey.py --lengths 400,1000 --prompts 20

Pass-key retrieval as in the paper (section 4.2, after Mohtashami and Jaggi 2023): a random five-digit number at
a random place among filler sentences, asked for at the end; right when the number is in the answer. Each
length is given in tokens. `full attention` is the plain model with all of the prompt in its window; `memory` is
the same model attached, with its window of 512 tokens, everything before that in memory, and dense retrieval; the
last column counts only the prompts whose number lies in memory, not in the window.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
import transformers

import longfocus
from longfocus.model.windows import plan_steps

OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "What is the pass key? The pass key is"


def prompt(tokenizer: Any, length: int, rng: random.Random) -> tuple[str, str]:
    """A prompt of about `length` tokens, and the number."""
    key = str(rng.randint(10000, 99999))
    fact = f"The pass key is {key}. Remember it. {key} is the pass key."
    fixed = len(tokenizer(f"{OPENING}{fact}\n{QUESTION}")["input_ids"])
    fillers = max(1, (length - fixed) // len(tokenizer(f" {FILLER}")["input_ids"]))
    before = rng.randint(0, fillers)
    lines = [FILLER] * before + [fact] + [FILLER] * (fillers - before)
    return OPENING + " ".join(lines) + "\n" + QUESTION, key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="400,1000,2000,4000", help="prompt lengths in tokens")
    parser.add_argument("--prompts", type=int, default=10, help="prompts per length")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = longfocus.load_tokenizer()
    focused = longfocus.load("default")
    plain = transformers.AutoModelForCausalLM.from_pretrained(focused.config._name_or_path).eval()
    results = []
    print("| prompt tokens | full attention | memory | memory, number beyond the window |\n|---:|---:|---:|---:|")
    for length in map(int, arguments.lengths.split(",")):
        rng = random.Random(f"{arguments.seed} {length}")
        right = {"full attention": 0, "memory": 0, "beyond": 0}
        beyond = 0
        for _ in range(arguments.prompts):
            text, key = prompt(tokenizer, length, rng)
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            local = plan_steps(ids.shape[1], 0, focused.focus.config)[-1].tokens
            far = key not in tokenizer.decode(ids[0, -local:])
            beyond += far
            for name, model in (("full attention", plain), ("memory", focused)):
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=2
                )
                found = key in tokenizer.decode(out[0, ids.shape[1] :])
                right[name] += found
                right["beyond"] += found and far and name == "memory"
        print(
            f"| {length:,} | {right['full attention']} of {arguments.prompts} | {right['memory']} of {arguments.prompts} "
            f"| {right['beyond']} of {beyond} |"
        )
        sys.stdout.flush()
        results.append({"tokens": length, "prompts": arguments.prompts, "prompts_beyond": beyond, **right})
    print(json.dumps({"seed": arguments.seed, "memory_layers": list(focused.focus.config.layers), "results": results}))


if __name__ == "__main__":
    main()
