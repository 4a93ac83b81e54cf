#!/usr/bin/env bash
# A study of several GPUs in one go: a killed rank; speed, exposed communication and imbalance with both wires; the
# outputs against the first number of GPUs; what the cost model predicts. Run it from the root of the repository:
#
#   bash docs/scaling_study.sh                                                                     on 8 GPUs
#   KINDS="bf16-overlap fp8-overlap" bash docs/scaling_study.sh                                    with overlap
#   GPUS=1,2,4 LARGE_GPUS=2,4 bash docs/scaling_study.sh                                           on 4
#   GPUS=1,2 LARGE_GPUS=1,2 bash docs/scaling_study.sh                                             on 2
#   GPUS=1,2,4,8 SIZES=demo SMALL="--width 64 --height 64" OUT=study bash docs/scaling_study.sh    without any
#
# A part that fails is told and does not stop the others; the exit code is 1 then. Results are written as they come.
set -euo pipefail

GPUS=${GPUS:-1,2,4,8}                      # numbers of GPUs
LARGE_GPUS=${LARGE_GPUS:-4,8}              # and at 219,524 rows, where one GPU takes minutes a call
SIZES=${SIZES:-hyperflow-12s 1080p15}      # presets
KINDS=${KINDS:-bf16 fp8}                   # wires, and with overlap
SMALL=${SMALL:-}                           # more arguments, to make requests smaller
RUNS=${RUNS:-0}                            # instrumented calls; with 0 the timed one carries the instruments, 0.1 % of it
OUT=${OUT:-docs/results}
PYTHON=${PYTHON:-python3}
SOLGEN=${SOLGEN:-$PYTHON -m solgen}

counts() { if [[ $1 == *1080p15 ]]; then echo "$LARGE_GPUS"; else echo "$GPUS"; fi; }

most=$(for size in $SIZES; do counts "$size"; done | tr , '\n' | sort -n | tail -n 1)
if ((most < 2)); then
    echo "error: this study compares numbers of GPUs; set GPUS and LARGE_GPUS, as GPUS=1,2" >&2
    exit 1
fi
visible=$($PYTHON -c 'import torch; print(torch.cuda.device_count())')
if ((visible && visible < most)); then
    echo "error: this study takes $most GPUs and $visible are visible; set GPUS and LARGE_GPUS, as GPUS=1,2" >&2
    exit 1
fi
mkdir -p "$OUT"
work=$(mktemp -d)
trap 'jobs -p | xargs -r kill 2>/dev/null || true; rm -r "$work"' EXIT
failed=0
files=()

fail() { # what
    echo "FAILED: $1"
    failed=1
}

lose_a_rank() { # preset: kill one of the most ranks in its calls; the others must end, with one message
    local job ranks rank code=0 started
    $SOLGEN profile --dummy-weights $SMALL --preset "$1" --attention sol-attn2 --runs 1000 --gpus "$most" \
        >"$work/out" 2>"$work/err" &
    job=$!
    until grep -qs '^warm-up' "$work/err"; do
        if ! kill -0 $job 2>/dev/null; then fail "no rank came to be killed: $(tail -n 1 "$work/err")"; return; fi
        sleep 1
    done
    ranks=$(grep -ls "^PPid:[[:space:]]*$job\$" /proc/[0-9]*/status | sed 's/status$/cmdline/' | xargs grep -ls spawn_main)
    ranks=$(cut -d / -f 3 <<<"$ranks")
    started=$SECONDS
    kill -KILL "$(tail -n 1 <<<"$ranks")"
    while kill -0 $job 2>/dev/null && ((SECONDS - started < 60)); do sleep 1; done
    kill $job 2>/dev/null
    wait $job || code=$?
    echo "$most ranks ended $((SECONDS - started)) s after one was killed, code $code: $(tail -n 1 "$work/err")"
    if ((code != 1 || SECONDS - started >= 30)) || [[ -s $work/out ]] || ! grep -q 'ended by SIGKILL' "$work/err"; then
        fail "a killed rank should end the job within 30 s with code 1 and its name"
    fi
    for rank in $ranks; do
        if [[ -e /proc/$rank ]]; then fail "rank $rank is left behind"; fi
    done
}

measure() { # preset, kind
    local file=$OUT/scaling-$1-$2 arguments
    arguments=(--preset "$1" --gpus "$(counts "$1")" --set "parallel.wire=${2%-overlap}")
    if [[ $2 == bf16 ]]; then arguments+=(--attention dense,sol-attn2); else arguments+=(--attention sol-attn2); fi
    if [[ $2 == *-overlap ]]; then arguments+=(--set parallel.overlap=on); fi
    if $PYTHON -c 'import matplotlib' 2>/dev/null; then arguments+=(--plot "$file.png"); fi
    $SOLGEN profile --dummy-weights --density 0.1 --runs "$RUNS" $SMALL "${arguments[@]}" --json >"$work/json" || return
    mv "$work/json" "$file.json"
    files+=("$file.json")
    $PYTHON - "$file.json" <<'PYTHON'
import json, sys

found = json.load(open(sys.argv[1]))
fp8, failed = found["reports"][0]["facts"]["wire"] == "fp8", False
calls = {(row["arm"], row["gpus"]): row["call_ms"] for row in found["scaling"]}
for row in found["scaling"]:
    bound = 5e-3 if row["arm"] == "dense" else 3e-2 if fp8 else 2e-2
    fits = max(row["video_error"], row["audio_error"]) < bound and row["attention_error"] < 2**-4  # half a step of E4M3
    failed |= not fits
    dense = calls.get(("dense", row["gpus"]))
    gain = f"{dense / row['call_ms']:.2f}x over dense, " if dense and row["arm"] != "dense" else ""
    print(
        f"{row['arm']} on {row['gpus']}: {row['call_ms']:,.0f} ms, {row['speedup']:.2f}x, "
        f"efficiency {row['efficiency']:.1%}, {gain}"
        f"exposed {row['communication_share']:.1%}, imbalance {row['imbalance']:.1%}, "
        f"error of video {row['video_error']:.1e}, sound {row['audio_error']:.1e}, "
        f"attention {row['attention_error']:.1e} {'ok' if fits else 'TOO LARGE'}"
    )
sys.exit(failed)
PYTHON
}

echo "== a killed rank"
lose_a_rank "${SIZES%% *}" || true

for kind in $KINDS; do
    for size in $SIZES; do
        echo "== $size, $kind"
        measure "$size" "$kind" || fail "$size, $kind"
    done
done

echo "== prediction beside measurement"
for size in $SIZES; do # where the study has none, one GPU as it was measured before
    if [[ -e docs/results/profile-$size.json ]]; then files+=("docs/results/profile-$size.json"); fi
done
$SOLGEN bench scaling "${files[@]}" --gpus "$GPUS" --json "$OUT/scaling-model.json" || fail "prediction"
echo "== done after $SECONDS s"
exit $failed
