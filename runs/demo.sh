#!/usr/bin/env bash
# The whole path on real input: ask a question of a real repository, the source code of an installed package.
# On 2 cores: about a minute and a half of reading for some 33,000 tokens, after half a minute of converting the
# model the first time.
set -euo pipefail
bin=${BIN:-.venv/bin}
longfocus=$(realpath "$bin/longfocus")
repository=$("$bin/python" -c "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('tqdm').origin).parent)")
question=${1:-How does tqdm estimate the remaining time?}
cd "$repository/.."
options="--max-new-tokens 80"
echo "longfocus ask tqdm/*.py \"$question\" $options"
exec "$longfocus" ask tqdm/*.py "$question" $options
