#!/usr/bin/env bash
# All baselines of the figures on this machine's first GPU, one after the other, each with a time limit.
#
#   benchmarks/gpu/baselines.sh [plain] [trl] [trl_iteration] [sglang]        (default: all of them)
#
# SHAPES ("135m 0.5b 1.5b"), FOLDER (/dev/shm/gpu-bench), GPU_RESULTS ($OUT/results.jsonl, else ./results.jsonl),
# LIMIT (150 seconds each), PLAIN ("eager eager+master layers layers+master"), TRL ("liger"; plain, compile and bf16 are
# the others: compiled, TRL passes attention an explicit mask, which is slower), TRL_ITERATION ("float32 bf16"; continuous
# is the other). Batches of trl_iteration and sglang are those of benchmarks.gpu.iteration for the shape, so that
# the report can compare. A failed or slow one does not stop the rest.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export GPU_RESULTS=${GPU_RESULTS:-${OUT:-.}/results.jsonl}
SHAPES=${SHAPES:-135m 0.5b 1.5b} FOLDER=${FOLDER:-/dev/shm/gpu-bench} LIMIT=${LIMIT:-150}
[ $# -gt 0 ] || set -- plain trl trl_iteration sglang
run() {  # MODULE ARGUMENTS…
  local began=$SECONDS
  timeout --kill-after=10 "$LIMIT" python3 -m "benchmarks.gpu.$@" 2>>"$GPU_RESULTS.log" ||
    echo "benchmarks.gpu.$* failed ($?); see $GPU_RESULTS.log, which ends: $(tail -n 3 "$GPU_RESULTS.log")"
  echo "# $1 $2: $((SECONDS - began)) s"
}
python3 -m benchmarks.gpu.shapes "$FOLDER" $SHAPES 2>>"$GPU_RESULTS.log" || exit 1
for part in "$@"; do
  for shape in $SHAPES; do
    case $part in
      plain) for v in ${PLAIN:-eager eager+master layers layers+master}; do
        master=; [ "${v%+master}" = "$v" ] || master=--master
        run baseline_step "$shape" --variant "${v%+master}" $master ${STEP_OPTIONS:-}; done ;;
      trl) for v in ${TRL:-liger}; do
        run baseline_trl_step "$shape" --model "$FOLDER/$shape" --variant "$v" ${TRL_OPTIONS:-}; done ;;
      trl_iteration)
        [ "$shape" = "${TRL_SHAPE:-135m}" ] || continue
        python3 -m benchmarks.gpu.prompts "$FOLDER/$shape" "$FOLDER/prompts-$shape-64.jsonl" 2>>"$GPU_RESULTS.log"
        for v in ${TRL_ITERATION:-float32 bf16}; do
          run baseline_trl_iteration "$shape" --model "$FOLDER/$shape" --prompts "$FOLDER/prompts-$shape-64.jsonl" \
            --variant "$v"; done ;;
      sglang)
        [ "$shape" = 0.5b ] && continue
        python3 -m benchmarks.gpu.prompts "$FOLDER/$shape" "$FOLDER/prompts-$shape-64.jsonl" 2>>"$GPU_RESULTS.log"
        LIMIT=$((LIMIT + 30)) run baseline_sglang "$shape" --model "$FOLDER/$shape" --prompts "$FOLDER/prompts-$shape-64.jsonl" ;;
      *) echo "unknown part $part" >&2; exit 2 ;;
    esac
  done
done
python3 -m benchmarks.gpu.report "$GPU_RESULTS" 2>/dev/null || true
