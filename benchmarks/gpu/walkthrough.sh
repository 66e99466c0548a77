#!/usr/bin/env bash
# The commands of docs/start.md and docs/guides/gpus.md on this machine, with few and short iterations: one GPU, then
# servers that run already.
#
#   benchmarks/gpu/walkthrough.sh [one] [servers]
#
# MODEL (a random-weights model is made in /dev/shm if it is not set), DATA (made up likewise; a folder with
# train.jsonl and test.jsonl), FLAGS (of SGLang, as a recipe's inference.flags).
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export AREALFLOW_HOME=${AREALFLOW_HOME:-/tmp/walkthrough} AREALFLOW_STORE=${AREALFLOW_STORE:-file:///tmp/walkthrough/store}
FLAGS=${FLAGS:-"{attention-backend: triton, sampling-backend: pytorch, grammar-backend: none, disable-prefill-cuda-graph: true}"}
work=/dev/shm/walkthrough
mkdir -p "$work" "$AREALFLOW_HOME"
arealflow() { python3 -c 'from flows.cli.main import main; main()' "$@"; }
if [ -z "${MODEL:-}" ]; then
  python3 -m benchmarks.gpu.shapes "$work" 0.5b
  MODEL=$work/0.5b
fi
if [ -z "${DATA:-}" ]; then
  python3 -m benchmarks.gpu.prompts "$MODEL" "$work/train.jsonl" --count 256 --tokens 64
  head -n 32 "$work/train.jsonl" >"$work/test.jsonl"
  DATA=$work
fi
trap 'arealflow down; [ -z "${server:-}" ] || kill -TERM -- "-$server" 2>/dev/null || true' EXIT
common="model.path=$MODEL model.max_length=512 data.source=$DATA/{split}.jsonl data.subset= rollout.groups=8
  rollout.max_new_tokens=128 reward.verifier=benchmarks.gpu.coin:verify evaluation={} schedule.iterations=3
  algorithm.minibatches=1 trainer.warmup_steps=1 trainer.compile=false 'inference.flags=$FLAGS' ${MORE:-}"
common=$(tr -s ' \n' ' ' <<<"$common")

run() {  # NAME FURTHER_OVERRIDES
  python3 -m benchmarks.gpu.product rlhf/gsm8k "$1" "$common $2"
  arealflow sql "$1" "SELECT iteration, round(avg(reward), 3) AS reward, count(*) AS samples FROM samples GROUP BY 1 ORDER BY 1"
  arealflow sql "$1" "SELECT iteration, transport, materialised, round(list_max(load_seconds), 2) AS loaded FROM publish ORDER BY 1"
  arealflow sql "$1" "SELECT iteration, logprob_gap_mean, logprob_gap_max, ratio_outside FROM train_steps ORDER BY 1"
}

[ $# -gt 0 ] || set -- one servers
for part in "$@"; do
  case $part in
    one)
      arealflow doctor || true
      arealflow up
      run "one-$(date +%H%M%S)" ""
      arealflow down ;;
    servers)
      export SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1
      setsid python3 -m sglang.launch_server --model-path "$MODEL" --port 30000 --dtype bfloat16 --context-length 520 \
        --mem-fraction-static 0.3 --skip-server-warmup --attention-backend triton --sampling-backend pytorch \
        --grammar-backend none --disable-prefill-cuda-graph >"$AREALFLOW_HOME/own-server.log" 2>&1 &
      server=$!
      export AREAL_LLM_SERVER_ADDRS=127.0.0.1:30000
      until curl -sf -o /dev/null 127.0.0.1:30000/health; do
        kill -0 "$server" || { tail -n 30 "$AREALFLOW_HOME/own-server.log"; exit 1; }
        sleep 1
      done
      arealflow up
      run "servers-$(date +%H%M%S)" "trainer.weights_every=1 inference.transport=store"
      arealflow down
      kill -0 "$server" && echo "the server is still there, as it should be" ;;
    *) echo "unknown part $part" >&2; exit 2 ;;
  esac
done
