#!/usr/bin/env bash
# `make demo-s3`: the demo with its store on a real S3 server, started here and stopped at the end.
# The server's keys reach the flow by environment alone; its services share nothing but the store.
set -euo pipefail
cd "$(dirname "$0")/.."
export AREALFLOW_HOME="$PWD/.arealflow/s3"
mkdir -p "$AREALFLOW_HOME"
settings="$AREALFLOW_HOME/environment"
rm -f "$settings"
(umask 077 && exec .venv/bin/python tests/s3_server.py "$AREALFLOW_HOME/bucket" >"$settings") &
server=$!
trap '.venv/bin/arealflow down; kill $server; wait $server 2>/dev/null || true; rm -f "$settings"' EXIT
for _ in $(seq 600); do
  grep -q AREALFLOW_STORE "$settings" 2>/dev/null && break
  kill -0 $server
  sleep 0.1
done
# shellcheck disable=SC1090
source "$settings"
.venv/bin/python -m flows.demo --store "$AREALFLOW_STORE" "$@"
