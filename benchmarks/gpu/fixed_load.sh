#!/usr/bin/env bash
# Asynchronous and synchronous runs under one fixed load on two or more GPUs: 64 × 8 samples an iteration, as long as
# benchmarks/simulate.py draws them, the 1.5B shape with random weights. What each run's tables say goes to RESULTS.
#
#   benchmarks/gpu/fixed_load.sh                  all configurations for two GPUs, in about 40 minutes
#   benchmarks/gpu/fixed_load.sh split-4-saves@290 shared-0@250 split-1 …   LAYOUT-η[-abort][-equal][-pace][-half][-saves][-zero3][@SECONDS]
#   GPUS=4 benchmarks/gpu/fixed_load.sh split-4@290 shared-0@250 split-1    two generate and two train; all four do both
#   GPUS=4 SHAPE=7b MORE=trainer.gradient_checkpointing=true benchmarks/gpu/fixed_load.sh shared-0-equal@290 shared-0-equal-zero3@290
#
# split: the first half of the GPUs trains, the second generates. shared: all do both in turn. one: one GPU does both.
# equal: all samples have 600 tokens. saves: weights are written every tenth version, a checkpoint after 90 s of training.
# pace: no more than 32 groups begin beyond those of the next iteration. half: servers have half as many groups at once.
# zero3: DeepSpeed, ZeRO-3, in place of FSDP2. What 7b needs: docs/guides/memory.md.
# A run is ended after its SECONDS (240), starts included, or ITERATIONS (60); the same case again resumes it. If the
# script itself is ended (SIGTERM), it collects what the run's tables have by then. GPUS (2; an even number, another
# FOLDER for each), SHAPE (1.5b), FOLDER (/dev/shm/asynchrony: models, stores, logs), RESULTS (FOLDER/results), STORE
# (file://FOLDER/store), MORE (further overrides). CPU=1: the embedded server and one process, to try the script itself.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
GPUS=${GPUS:-2} SHAPE=${SHAPE:-1.5b} FOLDER=${FOLDER:-/dev/shm/asynchrony}
RESULTS=${RESULTS:-$FOLDER/results}
export AREALFLOW_HOME=$FOLDER/home AREALFLOW_STORE=${STORE:-file://$FOLDER/store}
mkdir -p "$FOLDER" "$RESULTS"
python3 -m benchmarks.gpu.shapes "$FOLDER" "$SHAPE" 2>/dev/null
[ -f "$FOLDER/prompts.jsonl" ] || python3 -m benchmarks.gpu.prompts "$FOLDER/$SHAPE" "$FOLDER/prompts.jsonl" --count 512 --tokens 64

common="model.path=$FOLDER/$SHAPE data.source=$FOLDER/prompts.jsonl workflow.name=benchmarks.gpu.drawn:Drawn
  model.max_length=8256 rollout.max_new_tokens=8192 inference.request_timeout_seconds=600
  trainer.micro_batch_tokens=8256 launcher.type=local schedule.artifact_every=1000 schedule.iterations=${ITERATIONS:-60}
  inference.flags.max-running-requests=512"
half=$((GPUS / 2))
numbers() { echo "[$(seq -s , "$1" "$2")]"; }
split="trainer.ranks=$half trainer.gpus=$(numbers 0 $((half - 1))) inference.servers=$half
  inference.gpus=$(numbers "$half" $((GPUS - 1))) inference.memory_fraction=0.8 inference.max_concurrent_requests=192"
shared="trainer.ranks=$GPUS trainer.gpus=$(numbers 0 $((GPUS - 1))) inference.servers=$GPUS
  inference.gpus=$(numbers 0 $((GPUS - 1))) inference.memory_fraction=0.25 inference.max_concurrent_requests=64"
one="trainer.gpus=[0] inference.gpus=[0] inference.memory_fraction=0.25 inference.max_concurrent_requests=192"
longest=8192
if [ -n "${CPU:-}" ]; then
  longest=24
  common="$common model.dtype=float32 model.max_length=160 rollout.max_new_tokens=32 inference.engine=embedded trainer.backend=local trainer.compile=false
    rollout.groups=4 trainer.threads=1 inference.threads=1 inference.slots=32 inference.deterministic=false inference.memory_fraction=0
    inference.max_concurrent_requests=64 inference.flags={}"
  split="" shared="" one=""
fi

run() {  # CASE SECONDS
  local name=$1 eta median=600 sigma=1.0 layout log status=0 saves="trainer.weights_every=1000 trainer.recover_within_seconds=86400"
  layout=$(cut -d- -f1 <<<"$name") eta=$(cut -d- -f2 <<<"$name") log=$FOLDER/$name.log
  local own=("run=$name" "rollout.max_head_offpolicyness=$eta")
  [[ $name != *-abort* ]] || own+=(rollout.interruption=abort)
  [[ $name != *-equal* ]] || sigma=0.0
  [[ $name != *-pace* ]] || own+=(rollout.pace=32)
  [[ $name != *-half* ]] || own+=(inference.max_concurrent_requests=$([[ $layout = shared ]] && echo $((32 / GPUS)) || echo 96))
  [[ $name != *-zero3* ]] || own+=(trainer.backend=deepspeed trainer.zero_stage=3)
  [[ $name != *-saves* ]] || saves="trainer.weights_every=10 trainer.recover_within_seconds=90"
  [ -z "${CPU:-}" ] || saves=trainer.weights_every=1
  [ -z "${CPU:-}" ] || median=8
  own+=("workflow.arguments={median: $median, sigma: $sigma, longest: $longest}")
  echo "── $(date +%T) $name: ${own[*]}"
  # shellcheck disable=SC2086
  timeout --signal=TERM --kill-after=20 "$2" python3 -c 'from flows.cli.main import main; main()' run \
    benchmarks/gpu/iteration.yaml $common ${!layout} $saves ${MORE:-} "${own[@]}" >"$log" 2>&1 &
  trap "ended $name $!" TERM INT
  wait $! || status=$?
  trap - TERM INT
  grep -oE "iteration [0-9]+ done.*" "$log" | tail -n 2 || true
  [ $status = 0 ] || [ $status = 124 ] || { echo "ended with $status"; tail -n 8 "$log"; }
  collect "$name" || true
}

collect() { python3 -m benchmarks.gpu.fixed_load collect "$AREALFLOW_STORE" "$1" "$AREALFLOW_HOME/logs" "$RESULTS/$1.json"; }

ended() {  # CASE PROCESS: the run goes on while its tables are read, since there may be no time left after its end
  collect "$1" || true
  kill -TERM "$2"
  exit 143
}

freed() {  # wait until the visible GPUs are free: a server that starts while others end counts their memory as its own
  for _ in $(seq 40); do
    nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} --query-gpu=memory.used --format=csv,noheader,nounits 2>/dev/null | awk '$1 > 1500 {busy = 1} END {exit busy}' && return
    sleep 0.5  # only a poll
  done
}

[ $# -gt 0 ] || set -- split-4-saves@400 shared-0@300 split-1@250 split-0@250 split-2-equal@150 shared-0-equal@150 split-4-abort@310 one-1@320 one-0@320
for word in "$@"; do
  freed
  run "${word%@*}" "$([[ $word == *@* ]] && echo "${word#*@}" || echo 240)"
done
python3 -m benchmarks.gpu.fixed_load table "$RESULTS"/*.json
python3 -m benchmarks.gpu.fixed_load training "$RESULTS"/*.json
