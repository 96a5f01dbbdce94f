#!/usr/bin/env bash
# Measures one GPU, or the first chip of a TPU host, and writes DIR/report.html:
#
#   docs/accelerator.sh DIR [MINUTES [NAMES [TOKENS [GIN_BINDING...]]]]
#
# Runs the parts whose names match the regular expression NAMES, in MINUTES (10),
# with answers of TOKENS (128) tokens and PYTHON (.venv/bin/python). The same
# line continues: a part that has a result is not run again (scaling.md).
set -euo pipefail && trap 'exit 130' INT
(($#)) || { sed -n '2,8s/^# \{0,1\}//p' "$0" && exit 2; }
dir=$(realpath -m "$1") minutes=${2:-10} names=${3:-.} most="max_new_tokens = ${4:-128}"
bindings=("${@:5}") python=${PYTHON:-.venv/bin/python} todo=()
cd "$(dirname "${BASH_SOURCE[0]}")/.." && mkdir -p "$dir"
settings="$(git rev-parse HEAD; git status --porcelain -uno || true) $most ${bindings[*]}"
[[ -e $dir/settings ]] || echo "$settings" > "$dir/settings"
[[ $(< "$dir/settings") == "$settings" ]] || {
  echo "$dir has results of other code or settings: give another folder" >&2 && exit 2
}
run() { # COMMAND FLAG GIN_BINDING...: runs $part for at most $left seconds
  local arguments=("${@:3}" "${bindings[@]}")
  timeout --foreground --kill-after=9 "$left" "$python" -m "experiments.$1" "$2" \
    "${arguments[@]/#/--gin_bindings=}" --out="$dir/$part" < /dev/null >> "$dir/$part.log" 2>&1
}
for part in target 8b_bfloat16 mtp 8b_int8 eagle3 dspark hydra medusa draft prompts; do
  [[ ! $part =~ $names || -e $dir/$part/benchmark.json || -e $dir/$part/result.json ]] || todo+=("$part")
done
small="target/specsample.load.dtype = 'bfloat16'" end=$((SECONDS + 60 * minutes))
for part in "${todo[@]}"; do
  # A part that hangs leaves half of the time to the others.
  left=$((end - SECONDS)) && [[ $part == "${todo[-1]}" ]] || left=$((left / 2))
  ((left > 1)) || { echo "$part: no time was left" && continue; }
  echo "$part, at most $left s" && case $part in
    target) run benchmark --recipe= "Benchmark.$most" "$small" ;;
    8b_bfloat16) run benchmark --recipe=llama_8b "Benchmark.$most" ;;
    8b_int8) run benchmark --recipe=llama_8b "Benchmark.$most" "random_weights.params.weights = 'int8'" ;;
    prompts) run evaluate --gin_file=configs/runs/all.gin "Evaluation.$most" "$small" 'Evaluation.repeats = 0' ;;
    *) run benchmark --recipe= "Benchmark.$most" "$small" "Benchmark.methods = {'$part': @$part/methods.trained()}" ;;
  esac || echo "$part ended with code $? (124: its time was over): see $dir/$part.log" >&2
done
"$python" -m experiments.report --results="$dir" --title='Measured on the accelerator'
