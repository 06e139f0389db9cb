#!/usr/bin/env bash
# The fine-tune of the default model on a CUDA GPU: train, evaluate, export, within ten minutes on a large one.
#
#     bash runs/finetune_gpu.sh [OUTPUT]
#
# The recipe is the one of the shipped weights, with more documents side by side and more tokens, in bfloat16.
# Not run so far for want of a GPU; everything in it runs on a CPU too.
set -euo pipefail
OUT=${1:-out/smollm2-135m-gpu}
BIN=${BIN:-.venv/bin}
TOKENS=${TOKENS:-40_000_000}

"$BIN/longfocus" train recipes/smollm2-135m.yaml \
    --set run.output="$OUT" --set run.tokens="$TOKENS" --set run.precision=bfloat16 \
    --set crossbatch.places=8 --set run.save_every=200                       # most of the time

EVAL=("$BIN/longfocus" eval --device cuda --dtype bfloat16)
"${EVAL[@]}" passkey --model "$OUT/model" --lengths 8k,32k,100k,256k --samples 20 --out "$OUT/eval"   # about two minutes
"${EVAL[@]}" perplexity --model "$OUT/model" --lengths 4k,16k --set perplexity.tokens=100000 --out "$OUT/eval"
"${EVAL[@]}" perplexity --model default-base --plain --lengths 4k --set perplexity.tokens=100000 --out "$OUT/eval-base"
"$BIN/longfocus" report "$OUT/eval" "$OUT/eval-base" --to "$OUT/report.html"
echo "weights to ship: $OUT/model/trained.safetensors"
