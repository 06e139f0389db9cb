#!/usr/bin/env bash
# The fine-tune of the default model on a CUDA GPU: train, evaluate, export, within ten minutes on a large one.
#
#     bash runs/finetune_gpu.sh [OUTPUT]
#
# The recipe is the one of the shipped weights, with more documents side by side and more steps, in bfloat16.
# Not run so far for want of a GPU; everything in it runs on a CPU too.
set -euo pipefail
OUT=${1:-out/smollm2-135m-gpu}
BIN=${BIN:-.venv/bin}
STEPS=${STEPS:-1200}

"$BIN/longfocus" train recipes/smollm2-135m.yaml \
    --set run.output="$OUT" --set run.steps="$STEPS" --set run.precision=bfloat16 \
    --set crossbatch.places=8 --set run.save_every=200                       # most of the time

"$BIN/python" benchmarks/passkey.py --model "$OUT/model" --device cuda --dtype bfloat16 --rows memory \
    --lengths 8k,32k,100k,256k --prompts 20 --out "$OUT/passkey"             # about two minutes
"$BIN/python" benchmarks/perplexity.py --model "$OUT/model" --base default-base --device cuda --dtype bfloat16 \
    --parts books,code --memory 1k,4k,16k --full 4k,8k --out "$OUT/perplexity"
echo "weights to ship: $OUT/model/trained.safetensors"
