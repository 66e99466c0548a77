#!/usr/bin/env bash
# `make demo`: the quickstart through its deployment, followed to its end, and what its tables answer. All of these are
# commands that you can type yourself.
#
# STORE      folder or URL of the store
# DEMO_ENDS  set: the caller stops everything at the end
# arguments  further overrides, such as schedule.iterations=50
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
store=${STORE:-${AREALFLOW_STORE:-}}
run=quickstart-$(date -u +%Y%m%d-%H%M%S)
export COLUMNS=160 # Prefect would fold lines
[ -n "${DEMO_ENDS:-}" ] || trap 'echo "Interrupted. The run and its services go on; make down stops them."; exit 130' INT

started=$(mktemp)
arealflow up | tee "$started"
eval "$(grep '^export PREFECT_API_URL=' "$started")"
rm "$started"

echo "run $run: first supervised fine-tuning ($run-sft), which takes half a minute, then GRPO"
prefect deployment run rlhf/quickstart --watch --param "run=$run" --param "overrides=${store:+store.url='$store'} $*" |
  awk '/UUID: |\/flow-run\// { print } /arealflow.iteration.committed/ && ++n % 25 == 0 { print n, "iterations" } { fflush() }' ||
  { echo "The flow run did not complete; its log is in the Prefect UI." >&2; exit 1; }

ask() { # title, query
  printf '\n%s\narealflow sql %s "%s"\n' "$1" "$run" "$2"
  arealflow sql ${store:+--store "$store"} "$run" "$2"
}
ask "Reward and length as training goes on" "SELECT iteration // 50 * 50 AS from_iteration, count(*) AS samples,
    round(avg(reward), 3) AS reward, round(avg(num_generated), 2) AS tokens FROM samples GROUP BY 1 ORDER BY 1"
ask "Greedy accuracy, before and after" "SELECT weights_version AS version, round(avg(reward), 3) AS accuracy,
    count(*) AS prompts FROM evaluate GROUP BY 1 ORDER BY 1"
ask "The prompts that stay hardest" "SELECT prompt, answer, count(*) AS samples, round(avg(reward), 2) AS reward,
    mode(completion) AS usual_answer FROM samples WHERE iteration >= 200 GROUP BY ALL HAVING count(*) >= 8
    ORDER BY reward, prompt LIMIT 5"
ask "Tokens the policy was least sure of, and what they cost" "SELECT iteration, sample_id, position,
    round(logprob, 2) AS logprob, round(advantage, 2) AS advantage FROM tokens WHERE loss_mask ORDER BY logprob LIMIT 5"
ask "What it cost" "SELECT stage, round(sum(seconds), 1) AS seconds, sum(metrics['tokens'])::bigint AS tokens
    FROM stages GROUP BY 1 ORDER BY 2 DESC"
[ -n "${DEMO_ENDS:-}" ] ||
  printf '\nAsk more: .venv/bin/arealflow sql %s "SHOW TABLES"\nStop everything: make down\n' "$run"
echo "$SECONDS s in all"
