#!/usr/bin/env bash
# A GPU for eight minutes: what must hold on it, at most three, then the next cases not measured yet.
#
#   bash benchmarks/gpu.sh FOLDER [more for gpu.py]
#
# FOLDER gets checks.txt, gpu.txt, timelines, and gpu.jsonl, which begins with what benchmarks/ has:
# put it there for the next call.
set -u -o pipefail
folder=$(realpath "$1")
cd "$(dirname "$0")/.." || exit
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
# shellcheck disable=SC2086
timeout 180 "$python" tests/gpu_checks.py ${CHECKS:-} 2>&1 | tee "$folder/checks.txt" | tail -n 40
echo "checks ended with ${PIPESTATUS[0]} after $SECONDS s"
cp benchmarks/gpu.jsonl "$folder" 2>/dev/null
"$python" benchmarks/gpu.py --seconds $((465 - SECONDS)) --results "$folder/gpu.jsonl" \
    --timelines "$folder" "${@:2}" 2>&1 | tee "$folder/gpu.txt"
