#!/bin/sh
# Checks and measures on a machine with an NVIDIA GPU, in stages. Usage: sh scripts/gpu.sh FOLDER [STAGE ...]
#
#   goals-8b goals-qwen   the workloads of both models, where the time of a step goes, and the check of their tokens
#                         against a float32 model
#   tests                 what only a GPU can test: kernels, the runner, whole engines
#   faults                whether the tests of the kernels that only Hopper GPUs run find faults planted in them
#   http                  chat streams of SmolLM2 and of Qwen3-0.6B over HTTP, of the latter beside the engine alone
#                         (SMOLLM2: a folder of benchmarks.skeleton, or a GGUF file)
#   limits                a prompt of 100,000 tokens, 1,000 requests at once, and the memory that comes back
#   host                  a host that spins or sleeps beside the engine
#   startup               where the time goes until the first token, with empty caches, both models
#   settings sampling attention   what single settings and kernels cost
#
# Without a stage: all, in this order. What a stage prints goes to FOLDER/STAGE.txt as it comes, its figures to JSON files
# beside it, and a line to FOLDER/summary.txt when it ends. A stage that fails or takes too long does not stop the next.
# Nothing needs a network: kernels are compiled here, weights are random. PYTHON names the interpreter, PASSES how often
# the goals' workloads run, and LIMIT the most seconds of a stage where its own are too many.
set -u

cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,/^set/p' scripts/gpu.sh | sed '$d; s/^# \{0,1\}//' >&2; exit 2; }
folder=$1
shift
[ $# -ge 1 ] || set -- goals-8b goals-qwen tests faults http limits host startup settings sampling attention
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
failed=0

http() {
    status=0
    model=${SMOLLM2:-}
    if [ -z "$model" ]; then
        model=$("$PYTHON" -c 'from asyncllm.cli import find_smollm2; print(find_smollm2())')
    fi
    case $model in
    *.gguf) "$PYTHON" -m benchmarks.http "$model" --output "$folder/http.json" || status=1 ;;
    *) "$PYTHON" -m benchmarks.http "$model" --output "$folder/http.json" -- --load-format dummy || status=1 ;;
    esac
    "$PYTHON" -m benchmarks.skeleton "$folder/qwen3-0.6b" "$model" --config qwen3-0.6b || return 1
    "$PYTHON" -m benchmarks.http "$folder/qwen3-0.6b" --kinds process engine --streams 1 128 256 \
        --output "$folder/http-qwen3-0.6b.json" -- --load-format dummy --kv-cache-memory 40000000000 || status=1
    return $status
}

# Side by side, since tests wait for kernels to be compiled more than for the GPU; those that look at memory look at their
# own process's. Neighbours stay together, as they share what a module makes. The tests of the interpreter and of the
# processor's kernels are the CPU's. Each has one thread of torch, as in `make test`: the engines on the CPU that others are
# compared with have tiny models, and teams of threads would wait for each other while other tests have the processors.
gpu_tests() {
    status=0
    pytest() {
        OMP_NUM_THREADS=1 "$PYTHON" -m pytest -q -p no:cacheprovider -p tests.cut_short --tb no -r fE -m "not full" --maxfail 25 \
            --durations 10 "$@"
    }
    pytest tests/gpu -n "$((($(nproc) + 1) / 2))" --dist worksteal || status=1
    pytest tests/kernels --ignore tests/kernels/test_interpreter.py --ignore tests/kernels/cpu -n "$(nproc)" || status=1
    return $status
}

# They are marked `full`, since each compiles a kernel of its own; other kernels' run under the interpreter too.
planted_faults() {
    OMP_NUM_THREADS=1 "$PYTHON" -m pytest -q -p no:cacheprovider -p tests.cut_short --tb no -r fE -m full -k planted \
        -n "$(nproc)" --dist worksteal --durations 5 \
        tests/kernels/test_gated_linear.py tests/kernels/test_specialized_linear.py tests/kernels/test_specialized_attention.py
}

goals() {
    "$PYTHON" -m benchmarks.gpu "$1" --passes "${PASSES:-1}" --check --profile --output "$folder/gpu-$1.json"
}

both() {
    command=$1
    shift
    status=0
    for name in llama-3.1-8b qwen3-0.6b; do
        echo "== $name"
        "$PYTHON" -m "benchmarks.$command" $name "$@" --output "$folder/$stage-$name.json" || status=1
    done
    return $status
}

run() {
    case $1 in
    goals-8b) goals llama-3.1-8b ;;
    goals-qwen) goals qwen3-0.6b ;;
    tests) gpu_tests ;;
    faults) planted_faults ;;
    http) http ;;
    limits) "$PYTHON" -m benchmarks.limits llama-3.1-8b --output "$folder/limits.json" ;;
    host) both host ;;
    startup) both startup ;;
    settings) both settings ;;
    sampling) "$PYTHON" -m benchmarks.sampling --output "$folder/sampling.json" ;;
    attention) "$PYTHON" -m benchmarks.attention --only default ;;
    esac
}

seconds() {
    case $1 in
    goals-8b | host | attention) echo 300 ;;
    tests | settings) echo 480 ;;
    goals-qwen | faults | http | limits | sampling | startup) echo 240 ;;
    *) return 1 ;;
    esac
}

# A stage is this script again, in a process group of its own, so that one signal ends all of its processes.
# It waits for them: tests that are cut short tell which have failed.
if [ -n "${GPU_STAGE:-}" ]; then
    trap 'exit 143' TERM
    stage=$GPU_STAGE
    run "$stage"
    exit
fi

for stage in "$@"; do
    seconds "$stage" >/dev/null || { echo "gpu.sh: there is no stage $stage" >&2; exit 2; }
done
"$PYTHON" - <<'CHECK' || exit 1
import torch, asyncllm
if not torch.cuda.is_available():
    raise SystemExit("gpu.sh: torch sees no GPU here")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
CHECK
for stage in "$@"; do
    most=$(seconds "$stage")
    [ -n "${LIMIT:-}" ] && [ "$LIMIT" -lt "$most" ] && most=$LIMIT
    began=$(date +%s)
    echo "== $stage, at most $most s"
    { GPU_STAGE=$stage timeout -k 15 "$most" sh scripts/gpu.sh "$folder" 2>&1; echo $? >"$folder/.status"; } | tee "$folder/$stage.txt"
    status=$(cat "$folder/.status")
    rm -f "$folder/.status"
    case $status in
    0) word=passed ;;
    124 | 137) word="cut short after $most s" failed=1 ;;
    *) word="failed with $status" failed=1 ;;
    esac
    echo "$stage: $word, $(($(date +%s) - began)) s" | tee -a "$folder/summary.txt"
done
exit $failed
