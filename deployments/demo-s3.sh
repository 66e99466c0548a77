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
DEMO_ENDS=1 deployments/demo.sh "$@"
cat <<END
The Prefect server and the S3 server of this demo stop now; .arealflow/s3 keeps what they hold. To ask the runs again:
  .venv/bin/python tests/s3_server.py .arealflow/s3/bucket > s3.env &      # a new server on the same folder, with new keys
  sleep 5; source s3.env; .venv/bin/arealflow runs
END
