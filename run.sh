#!/usr/bin/env bash
# Shows an answer as it is written, plainly and with drafts, then compares ways
# to draft over a few prompts. Arguments go to experiments.evaluate, and then
# only the comparison is run, for example
#   ./run.sh --limit=2 --gin_bindings='Evaluation.max_new_tokens=32'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=.ci/environment.sh
source .ci/environment.sh

environment run
if (($# == 0)); then
  "$PYTHON_IN_VENV" -m experiments.generate --chat --drafter=none,auto --show \
    --prompt='Write a letter to a friend about a rainy week by the sea, and what you did each day.'
fi
"$PYTHON_IN_VENV" -m experiments.evaluate \
  --gin_file=configs/runs/quickstart.gin --out=results/quickstart \
  --prompts=experiments/data/quickstart.jsonl "$@"
if (($# == 0)); then
  cat <<END

More, in the same environment ($VENV/bin/python -m ...):
  experiments.generate --interactive                      a chat
  experiments.evaluate --gin_file=configs/runs/all.gin    every method, with the parts of a round: 20 minutes
  experiments.report                                      the results as a page
  experiments.certify --out=results/certificate           why the output is exact: 40 minutes
END
fi
