#!/usr/bin/env bash
# A tiny mixture of experts (Qwen3-MoE, random weights) with SGLang: the contract's cases, among them that weights which
# do not arrive are noticed; then a run through the product by each transport, with the proof and the distance of the
# engines' logprobs, which includes new experts from the second iteration on.
#
#   benchmarks/gpu/experts.sh [contract] [tensor] [store] [nccl]        (default: contract, tensor and store on one GPU)
#
# FOLDER (/dev/shm/experts: model, store, logs); CPU=1 tries the script itself with the embedded server: contract, store.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
FOLDER=${FOLDER:-/dev/shm/experts}
export AREALFLOW_HOME=$FOLDER/home AREALFLOW_STORE=file://$FOLDER/store
mkdir -p "$FOLDER"
arealflow() { python3 -c 'from flows.cli.main import main; main()' "$@"; }
server=real_server
overrides="model.path=$FOLDER/model model.max_length=32 data.source=sums://4 rollout.groups=16 rollout.max_new_tokens=8
  reward.verifier=exact trainer.compile=false trainer.lr=1e-3 trainer.micro_batch_tokens=2048 trainer.weights_every=3
  launcher.type=local schedule.iterations=3 schedule.artifact_every=100"
if [ -n "${CPU:-}" ]; then
  server=embedded_server
  overrides="$overrides model.dtype=float32 inference.engine=embedded inference.flags={} trainer.weights_every=1
    inference.memory_fraction=0 inference.max_concurrent_requests=64 trainer.backend=local trainer.threads=1
    inference.threads=1 inference.slots=32"
fi

contract() {
  python3 -m pytest -o addopts= -p no:cacheprovider tests/sglang/test_contract.py -q -rs -k "experts and $server"
}

through() {  # TRANSPORT
  local run log transport=inference.transport=$1
  run=experts-$1-$(date +%s) log=$FOLDER/experts-$1.log
  [ "$1" != tensor ] || transport="$transport trainer.gpus=[0] inference.gpus=[0]" # one GPU for both, also where there are more
  [ "$1" != store ] || transport="$transport trainer.weights_every=1"
  [ -z "${CPU:-}" ] || transport=
  echo "── $run"
  # shellcheck disable=SC2086
  arealflow run benchmarks/gpu/iteration.yaml "run=$run" $overrides $transport >"$log" 2>&1 ||
    { tail -n 25 "$log"; return 1; }
  grep -oE "new weights reach.*" "$log" || [ -n "${CPU:-}" ]
  arealflow sql "$run" "SELECT iteration, logprob_gap_mean, logprob_gap_max, ratio_outside FROM train_steps ORDER BY 1"
  arealflow sql "$run" "SELECT iteration, transport, round(list_max(load_seconds), 3) AS seconds FROM publish ORDER BY 1"
}

[ -f "$FOLDER/model/config.json" ] || python3 -c "
from pathlib import Path
from tests.sglang.contract_weights import make_experts
make_experts(Path('$FOLDER/model'), 256)"
[ $# -gt 0 ] || if [ -n "${CPU:-}" ]; then set -- contract store; else set -- contract tensor store; fi
for part in "$@"; do
  case $part in
    contract) contract ;;
    tensor | store | nccl) through "$part" ;;
    *) echo "unknown part $part" >&2; exit 2 ;;
  esac
done
