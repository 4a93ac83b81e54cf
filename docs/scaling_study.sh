#!/usr/bin/env bash
# A study of several GPUs in one go: speed, exposed communication and imbalance with both wires, the outputs against
# the first number of GPUs, what the cost model predicts, and a killed rank. Run it from the root of the repository:
#
#   bash docs/scaling_study.sh                                                   on 8 GPUs
#   GPUS=1,2 LARGE_GPUS=1,2 RUNS=0 bash docs/scaling_study.sh                    on 2, each call made once
#   GPUS=1,2 SIZES="demo" SMALL="--width 64 --height 64 --steps 1" OUT=/tmp/study bash docs/scaling_study.sh    gloo
set -euo pipefail

GPUS=${GPUS:-1,2,4,8}                      # numbers of GPUs at 83,061 rows
LARGE_GPUS=${LARGE_GPUS:-4,8}              # and at 219,524, where one GPU takes minutes a call
SIZES=${SIZES:-hyperflow-12s 1080p15}      # presets
KINDS=${KINDS:-bf16 bf16-overlap fp8 fp8-overlap}
SMALL=${SMALL:-}                           # more arguments, to make requests smaller
RUNS=${RUNS:-1}                            # instrumented calls; 0 where time is short
OUT=${OUT:-docs/results}
SOLGEN=${SOLGEN:-python -m solgen}
mkdir -p "$OUT"

profile() { # file, numbers of GPUs, arguments
    local file=$1 gpus=$2
    shift 2
    echo "== $file"
    $SOLGEN profile --dummy-weights --density 0.1 --runs "$RUNS" $SMALL --gpus "$gpus" "$@" --json >"$OUT/$file.json"
}

for size in $SIZES; do
    gpus=$GPUS
    if [[ $size == *1080p15 ]]; then gpus=$LARGE_GPUS; fi
    for kind in $KINDS; do
        arguments=(--preset "$size" --set "parallel.wire=${kind%-overlap}" --attention sol-attn2)
        if [[ $kind == *-overlap ]]; then arguments+=(--set parallel.overlap=on); fi
        if [[ $kind == bf16 ]]; then arguments+=(--attention dense,sol-attn2); fi
        if python -c 'import matplotlib' 2>/dev/null; then arguments+=(--plot "$OUT/scaling-$size-$kind.png"); fi
        profile "scaling-$size-$kind" "$gpus" "${arguments[@]}"
    done
done

echo "== outputs: relative error at most 5e-3 dense, 2e-2 with Sol-Attn2, 3e-2 with the FP8 wire"
python - "$OUT" "$SIZES" "$KINDS" <<'PYTHON'
import json, sys
from pathlib import Path

folder, failed = Path(sys.argv[1]), False
for size in sys.argv[2].split():
    for kind in sys.argv[3].split():
        for row in json.loads((folder / f"scaling-{size}-{kind}.json").read_text())["scaling"]:
            bound = 5e-3 if row["arm"] == "dense" else 3e-2 if "fp8" in kind else 2e-2
            error = max(row["video_error"], row["audio_error"])
            failed |= not error < bound
            print(
                f"{size} {kind} {row['arm']} on {row['gpus']}: {row['call_ms']:,.0f} ms, {row['speedup']:.2f}x, "
                f"{row['efficiency']:.1%}, exposed {row['communication_share']:.1%}, hidden {row['hidden_ms']:,.0f} ms, imbalance {row['imbalance']:.1%}, "
                f"error {error:.1e} {'ok' if error < bound else 'TOO LARGE'}"
            )
sys.exit(failed)
PYTHON

echo "== prediction beside measurement"
for size in $SIZES; do
    for kind in $KINDS; do
        file=$OUT/scaling-$size-$kind.json
        if python -c "import json, sys; sys.exit(json.load(open('$file'))['reports'][0]['facts']['world size'] != 1)"; then
            $SOLGEN bench scaling "$file" --gpus "$GPUS" --json "$OUT/scaling-$size-$kind-model.json"
        fi
    done
done

echo "== a killed rank"
most=${GPUS##*,}
size=${SIZES%% *}
drill=$(mktemp -d)
$SOLGEN profile --dummy-weights $SMALL --preset "$size" --attention sol-attn2 --runs 1000 --gpus "$most" \
    >"$drill/out" 2>"$drill/err" &
job=$!
until grep -q '^warm-up' "$drill/err"; do
    kill -0 $job || { cat "$drill/err"; exit 1; }
    sleep 1
done
ranks=$(pgrep -P $job -f spawn_main)
kill -KILL "$(tail -n 1 <<<"$ranks")"
started=$SECONDS
code=0
wait $job || code=$?
echo "ended after $((SECONDS - started)) s with code $code; last line: $(tail -n 1 "$drill/err")"
[[ $code == 1 && $((SECONDS - started)) -lt 30 && ! -s $drill/out ]]
grep -q 'was ended by SIGKILL' "$drill/err"
for rank in $ranks; do
    if [[ -e /proc/$rank ]]; then echo "rank $rank is left behind"; exit 1; fi
done
rm -r "$drill"
echo "== done"
