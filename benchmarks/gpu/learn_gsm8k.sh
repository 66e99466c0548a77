#!/usr/bin/env bash
# GSM8K on a GPU host, from SmolLM2-135M-Instruct: benchmarks/gpu/learn_gsm8k.py with the model made first.
#
#   benchmarks/gpu/learn_gsm8k.sh [options of learn_gsm8k.py]
#
# MODEL (/tmp/smollm2): the model's folder. If it is not there, it is made from its GGUF: GGUF_HALVES names the two
# halves' prefix (PREFIX.0, PREFIX.1, PREFIX.sha256), MODELS the folder of fetch_smollm2.py and split_pack.sh.
# DATA (.kit/gsm8k): folder with train.jsonl and test.jsonl.  LEARN (/tmp/learn): store and logs; keep it between calls.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
MODEL=${MODEL:-/tmp/smollm2} DATA=${DATA:-.kit/gsm8k} LEARN=${LEARN:-/tmp/learn}
began=$SECONDS
if [ ! -f "$MODEL/model.safetensors" ]; then
  : "${GGUF_HALVES:?$MODEL has no model: set GGUF_HALVES or MODEL}" "${MODELS:?set MODELS to the folder of fetch_smollm2.py}"
  sh "$MODELS/split_pack.sh" join "$GGUF_HALVES" /tmp/smollm2.gguf
  python3 "$MODELS/fetch_smollm2.py" "$MODEL" --gguf /tmp/smollm2.gguf
fi
python3 -m benchmarks.gpu.learn_gsm8k --model "$MODEL" --data "$DATA" --folder "$LEARN" \
  --seconds $((${SECONDS_IN_ALL:-560} - (SECONDS - began))) "$@"
