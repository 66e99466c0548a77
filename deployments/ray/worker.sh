#!/usr/bin/env bash
# A Prefect worker on a machine that joins a Ray cluster: flows run here, and their services on the cluster's nodes.
#
#   RAY_ADDRESS=10.0.0.1:6379 PREFECT_API_URL=http://10.0.0.1:4200/api deployments/ray/worker.sh --node-ip-address=10.0.0.9
#
# Flows have this environment: set AREALFLOW_STORE=s3://… and the store's keys, too, and PREFECT_API_AUTH_STRING if the
# server asks for a login. Arguments are further options of `ray start`. Ray gives this machine's CPUs and GPUs to no
# service. If Ray or the worker ends, the other is ended as well: have the service manager, or Kubernetes, start this again.
set -euo pipefail
set -m # the worker is in a group of its own: Ctrl-C reaches it once, as the SIGTERM below, and it ends in order

: "${RAY_ADDRESS:?HOST:PORT of the head of the Ray cluster}" "${PREFECT_API_URL:?http://HOST:4200/api of the Prefect server}"

ray start --block --address="$RAY_ADDRESS" --num-cpus=0 --num-gpus=0 "$@" &
ray=$!
python -P -m flows.worker &
worker=$!
trap 'kill -TERM "$worker"' TERM INT
code=0
wait -n || code=$?
for process in "$worker" "$ray"; do # flows end before Ray does
  kill -TERM "$process" 2>/dev/null || true
  while kill -0 "$process" 2>/dev/null; do wait "$process" || true; done
done
exit "$code"
