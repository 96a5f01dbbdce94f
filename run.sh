#!/usr/bin/env bash
# Decodes a few prompts with a real model, plainly and speculatively, and prints
# what speculation gained. Arguments go to experiments.evaluate, for example
#   ./run.sh --limit=2 --gin_bindings='Evaluation.max_new_tokens=32'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=.ci/environment.sh
source .ci/environment.sh

environment run
exec "$PYTHON_IN_VENV" -m experiments.evaluate \
  --gin_file=configs/runs/quickstart.gin --out=results/quickstart "$@"
