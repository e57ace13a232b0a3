#!/usr/bin/env bash
# compute-sanitizer over tests/gpu_short_run.py: once step by step, every tensor an allocation of its
# own, so that every access beyond one is seen; once with captured graphs.
#
#     benchmarks/gpu_sanitizer.sh [memcheck] [racecheck] [initcheck] [synccheck]
#
# Prints OK, or what was found; the exit code tells, too. Without arguments: memcheck. PYTHON is the
# interpreter, COMPUTE_SANITIZER the tool where it is not found by itself.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
sanitizer=$(command -v "${COMPUTE_SANITIZER:-compute-sanitizer}") || {
	echo "compute-sanitizer is not there. It comes with the CUDA toolkit; say where by COMPUTE_SANITIZER=." >&2
	exit 2
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Runs the command given; shows what it printed only if it fails.
quietly() {
	"$@" >"$log" 2>&1 && return
	local code=$?
	cat "$log"
	echo "FAILED: $*" >&2
	exit "$code"
}

# -P: tests/ must not come first on the path, it has a streamkv/ of its own.
short_run=("$python" -P tests/gpu_short_run.py)
# Compiles every kernel and measures every tile first: under the tool both are slow.
quietly "${short_run[@]}" --eager
quietly "${short_run[@]}"
for tool in "${@:-memcheck}"; do
	# Libraries try what a device may refuse: errors of the API alone say nothing.
	watched=("$sanitizer" --tool "$tool" --error-exitcode 99 --target-processes application-only
		--print-limit 20 --launch-timeout 120)
	[ "$tool" != memcheck ] || watched+=(--report-api-errors no)
	quietly env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${watched[@]}" "${short_run[@]}" --eager
	quietly "${watched[@]}" "${short_run[@]}"
done
echo OK
