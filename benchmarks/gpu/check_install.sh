#!/usr/bin/env bash
# Do the package's extras resolve together? Asks pip in a clean environment and installs nothing.
#
#   benchmarks/gpu/check_install.sh [PYTHON …]        (default: python3.11 python3.12, those that are there)
#
# EXTRAS: what to resolve (default "gpu gpu,datasets,bench"). Takes about three minutes each; some hundred
# megabytes of packages without separate metadata are downloaded and thrown away.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git ls-files | tar -cf - -T - | tar -xf - -C "$work"   # pip would leave its build files here
[ $# -gt 0 ] || set -- python3.11 python3.12
for python in "$@"; do
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "$python: not here, or older than 3.11; left out"
    continue
  fi
  "$python" -m venv "$work/venv-$(basename "$python")"
  pip=$work/venv-$(basename "$python")/bin/pip
  for extras in ${EXTRAS:-gpu gpu,datasets,bench}; do
    if (cd "$work" && "$pip" install --dry-run --disable-pip-version-check --no-cache-dir ".[$extras]" >pip.log 2>&1); then
      picked=$(tail -n 1 "$work/pip.log" | tr ' ' '\n' |
        grep -E '^(torch|transformers|sglang|deepspeed|trl|prefect|fastapi|s3fs)-[0-9]' | paste -sd ' ')
      echo "$("$python" --version) [$extras]: $picked"
    else
      echo "$("$python" --version) [$extras]: does not resolve" >&2
      tail -n 20 "$work/pip.log" >&2
      exit 1
    fi
  done
done
