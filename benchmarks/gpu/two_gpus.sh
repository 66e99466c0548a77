#!/usr/bin/env bash
# Two GPUs through the product: two ranks and one on the same tables, checkpoints from one rank to two and back, one
# server over both GPUs, as one service and as two that would be on two machines, weights over NCCL; and memory that
# trainer and server hand over on one GPU.
#
#   benchmarks/gpu/two_gpus.sh [fsdp2] [deepspeed] [tp] [over] [nccl] [shared]   (default: all of them)
#   SHAPE=0.5b benchmarks/gpu/two_gpus.sh over-nccl over-lost                    (with three GPUs)
#
# tp and over need a shape whose heads can be cut in two: SHAPE=0.5b. With three GPUs the server over two services gets
# its weights over NCCL, with η = 1; and it is started again after its second service was killed while it generates.
# SHAPE (135m), FOLDER (/dev/shm/two-gpus: models, store, logs; keep it, and a part that was cut goes on), MORE (further
# overrides), CPU=1 (two gloo ranks and the embedded server: fsdp2 and deepspeed only, to try the script itself).
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
SHAPE=${SHAPE:-135m} FOLDER=${FOLDER:-/dev/shm/two-gpus}
export AREALFLOW_HOME=$FOLDER/home AREALFLOW_STORE=file://$FOLDER/store
mkdir -p "$FOLDER"
arealflow() { python3 -c 'from flows.cli.main import main; main()' "$@"; }
python3 -m benchmarks.gpu.shapes "$FOLDER" "$SHAPE" 2>/dev/null
[ -f "$FOLDER/prompts.jsonl" ] || python3 -m benchmarks.gpu.prompts "$FOLDER/$SHAPE" "$FOLDER/prompts.jsonl" --count 512 --tokens 64

common="model.path=$FOLDER/$SHAPE data.source=$FOLDER/prompts.jsonl rollout.groups=16 rollout.max_new_tokens=128
  model.max_length=256 algorithm.minibatches=2 trainer.compile=false trainer.lr=1e-5 launcher.type=local
  schedule.artifact_every=100 ${MORE:-}"
[ -z "${CPU:-}" ] || common="$common model.dtype=float32 inference.engine=embedded inference.flags={}
  trainer.weights_every=1 inference.memory_fraction=0 inference.max_concurrent_requests=64 rollout.groups=4 rollout.max_new_tokens=16
  trainer.threads=1 inference.threads=1"

start() {  # RUN OVERRIDES…: the run's flow in a process of its own; the lines of its log that say what came of it
  local run=$1 log; shift
  log=$FOLDER/$run-$(date +%s).log
  echo "── $run: $*"
  # shellcheck disable=SC2086
  arealflow run benchmarks/gpu/iteration.yaml "run=$run" $common "$@" >"$log" 2>&1 || { tail -n 25 "$log"; return 1; }
  grep -oE "iteration [0-9]+ done.*|no policy loaded.*|the trainer holds.*|re-?trained.*|trainer .*GPU.*|inference-.*GPU.*|service .*ing it" "$log" || true
}

gaps() {  # RUN: how new weights came, and how far the server's logprobs are from the trainer's
  arealflow sql "$1" "SELECT p.iteration, transport, p.version, round(list_max(load_seconds), 3) AS load_seconds,
    round(logprob_gap_mean, 5) AS gap, round(grad_norm, 5) AS grad_norm
    FROM publish p JOIN train_steps t USING (iteration) WHERE t.minibatch = 0 ORDER BY 1"
}

table() {  # RUN
  arealflow sql "$1" "SELECT iteration, round(avg(loss), 7) AS loss, round(avg(grad_norm), 5) AS grad_norm,
    sum(total_tokens) AS tokens, sum(micro_batches) AS passes, round(sum(step_seconds), 2) AS seconds
    FROM train_steps GROUP BY 1 ORDER BY 1"
}

ranks() {  # BACKEND: rare checkpoints make the next start train the same iterations again, on another number of ranks
  local rare=trainer.recover_within_seconds=86400 always=trainer.recover_within_seconds=0.001
  local backend=trainer.backend=$1 run=two-$1
  start "$run" "$backend" trainer.ranks=1 "$always" schedule.iterations=2 # a checkpoint by one rank …
  start "$run" "$backend" trainer.ranks=2 "$rare" schedule.iterations=4   # … on two, which train two iterations …
  start "$run" "$backend" trainer.ranks=1 "$rare" schedule.iterations=5   # … that one rank trains again
  start "$run" "$backend" trainer.ranks=2 "$always" schedule.iterations=6 # the same the other way; a checkpoint by two
  start "$run" "$backend" trainer.ranks=1 "$rare" schedule.iterations=7   # … on one
  table "$run"
}

over="trainer.gpus=[0] inference.tensor_parallel=2 inference.nodes=2 inference.flags.cuda-graph-max-bs-decode=128"
apart="inference.gpus=[1,2] inference.transport=nccl rollout.max_head_offpolicyness=1"
[ $# -gt 0 ] || set -- fsdp2 deepspeed tp over nccl shared
# shellcheck disable=SC2086
for part in "$@"; do
  case $part in
    fsdp2 | deepspeed) ranks "$part" ;;
    tp) start two-tp trainer.gpus=[0] inference.tensor_parallel=2 inference.gpus=[0,1] schedule.iterations=3
      table two-tp ;;
    over) start two-over $over inference.gpus=[0,1] schedule.iterations=3
      gaps two-over ;;
    over-nccl) start two-over-nccl $over $apart schedule.iterations=4
      gaps two-over-nccl ;;
    over-lost) start two-over-lost $over $apart schedule.iterations=8 &
      until grep -qs "iteration 1 done" "$FOLDER"/two-over-lost-*.log; do
        kill -0 $! || exit 1
        sleep 0.2  # only a poll
      done
      kill -KILL "$(pgrep -of -- '--nnodes 2 --node-rank 1')"
      wait $!
      gaps two-over-lost ;;
    nccl) start two-nccl trainer.gpus=[0] inference.gpus=[1] inference.transport=nccl schedule.iterations=4
      arealflow sql two-nccl "SELECT iteration, transport, version, round(list_max(load_seconds), 3) AS seconds FROM publish" ;;
    shared) start two-shared trainer.gpus=[1] inference.gpus=[1] inference.release_memory=true schedule.iterations=3
      table two-shared ;;
    *) echo "unknown part $part" >&2; exit 2 ;;
  esac
done
