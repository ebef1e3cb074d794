#!/usr/bin/env bash
# The rules that find LibTorch and the system's libraries: what they take, what they
# refuse, and that they say in one line what to do. Runs a Bazel of its own.
set -euo pipefail

source_root="$(dirname "$(readlink -f WORKSPACE)")"
work="${TEST_TMPDIR}/work"
mkdir -p "${work}"
cp "${source_root}/WORKSPACE" "${work}/"
cp -rL "${source_root}/third_party" "${work}/"
cd "${work}"
unset TORCH_HOME COMPOSABLE_VENV VIRTUAL_ENV CONDA_PREFIX CUDA_HOME
export HOME="${TEST_TMPDIR}"
bazel=(bazel --nohome_rc "--output_user_root=${TEST_TMPDIR}/bazel" --max_idle_secs=15)
trap '"${bazel[@]}" shutdown >/dev/null 2>&1 || true' EXIT

failures=0
fail() {
  printf 'FAILED: %s\n%s\n' "$1" "$2" >&2
  failures=$((failures + 1))
}

# query VARIABLE=VALUE... LABEL: Bazel's output goes to ${output}.
query() {
  local label="${*: -1}"
  if output="$(env "${@:1:$#-1}" "${bazel[@]}" query --noshow_progress --color=no "${label}" 2>&1)"; then
    return 0
  fi
  return 1
}

# refuses NAME PATTERN [VARIABLE=VALUE...] LABEL: the pattern matches the one line after "ERROR:".
refuses() {
  local name="$1" pattern="$2"
  shift 2
  if query "$@"; then
    fail "${name}: not refused" "${output}"
  elif ! grep -qE "^ERROR: .*${pattern}" <<<"${output}"; then
    fail "${name}: no line with ${pattern}" "${output}"
  fi
}

accepts() {
  local name="$1"
  shift
  query "$@" || fail "${name}" "${output}"
}

# fake_torch FOLDER VERSION: as a wheel lays it out.
fake_torch() {
  mkdir -p "$1/include/ATen" "$1/lib"
  touch "$1/include/ATen/ATen.h" "$1/lib/libtorch_cpu.so"
  printf "__version__ = '%s'\ncuda: Optional[str] = None\n" "$2" >"$1/version.py"
}

for version in 1.13.1 2.10.2 2.16.0 3.0.0+cu140; do
  fake="${TEST_TMPDIR}/torch-${version%+*}"
  fake_torch "${fake}" "${version}"
  refuses "version ${version}" \
    "LibTorch: version ${version//+/\\+} at ${fake} is not supported \(supported: 2\.11 to 2\.15\): .*tools/bootstrap" \
    "TORCH_HOME=${fake}" @libtorch//:torch
done

for version in 2.11.0+cu130 2.15.3; do
  fake="${TEST_TMPDIR}/torch-${version}"
  fake_torch "${fake}" "${version}"
  accepts "version ${version}" "TORCH_HOME=${fake}" @libtorch//:torch
done

archive="${TEST_TMPDIR}/archive"
mkdir -p "${archive}/include"
echo 2.13.0+cpu >"${archive}/build-version"
accepts "a LibTorch archive" "TORCH_HOME=${archive}" @libtorch//:torch

# cuda NAME True|False PATTERN VARIABLE=VALUE...: whether @cuda counts as found; what Bazel says.
cuda() {
  accepts "$1" "${@:4}" @cuda//:cudart
  grep -qE "$3" <<<"${output}" || fail "$1: no line with $3" "${output}"
  grep -q "CUDA_FOUND = $2" "${TEST_TMPDIR}"/bazel/*/external/cuda/cuda.bzl ||
    fail "$1: CUDA_FOUND is not $2" "${output}"
}
cuda "LibTorch without CUDA" False "" "TORCH_HOME=${archive}"
torch="${TEST_TMPDIR}/site-packages/torch"
fake_torch "${torch}" 2.11.0
printf "__version__ = '2.11.0'\ncuda: Optional[str] = '13.0'\n" >"${torch}/version.py"
touch "${torch}/lib/libtorch_cuda.so"
toolkit="${TEST_TMPDIR}/cuda"
mkdir -p "${toolkit}"/{include,lib64}
cuda "no toolkit" False "CUDA code is not built, no toolkit at ${toolkit}: to build it, install the CUDA toolkit 13" \
  "TORCH_HOME=${torch}" "CUDA_HOME=${toolkit}"
touch "${toolkit}/include/cuda_runtime.h" "${toolkit}/lib64/libcudart.so"
echo "#define CUDA_VERSION 12080" >"${toolkit}/include/cuda.h"
cuda "a toolkit of another version" False "${toolkit} is of CUDA 12 and LibTorch 2.11.0 of CUDA 13" \
  "TORCH_HOME=${torch}" "CUDA_HOME=${toolkit}/."
echo "#define CUDA_VERSION 13000" >"${toolkit}/include/cuda.h"
nccl="${TEST_TMPDIR}/site-packages/nvidia/nccl"
mkdir -p "${nccl}"/{include,lib}
touch "${nccl}/include/nccl.h" "${nccl}/lib/libnccl.so.2"
cuda "a toolkit that fits" True "" "TORCH_HOME=${torch}" "CUDA_HOME=${toolkit}/"

venv="${TEST_TMPDIR}/venv"
fake_torch "${venv}/lib/python3.11/site-packages/torch" 2.12.0
accepts "the project's venv" "COMPOSABLE_VENV=${venv}" @libtorch//:torch
accepts "the active venv" "VIRTUAL_ENV=${venv}" @libtorch//:torch

refuses "nothing set" \
  "LibTorch: not found \(.*none is set\): run tools/bootstrap, or .pip install torch==2\.11\.0." \
  @libtorch//:torch
refuses "a venv without torch" \
  "LibTorch: not found \(.*VIRTUAL_ENV=${TEST_TMPDIR}/bazel\): run tools/bootstrap" \
  "VIRTUAL_ENV=${TEST_TMPDIR}/bazel" @libtorch//:torch
refuses "an empty TORCH_HOME" \
  "LibTorch: TORCH_HOME=${TEST_TMPDIR}/empty holds no LibTorch: run tools/bootstrap" \
  "TORCH_HOME=${TEST_TMPDIR}/empty" @libtorch//:torch

for library in ABSL:com_google_absl//:system:libabsl-dev GOOGLETEST:com_google_googletest//:gtest:libgtest-dev \
  NLOHMANN_JSON:nlohmann_json//:json:nlohmann-json3-dev GLOO:gloo//:headers:libgloo-dev; do
  variable="${library%%:*}_HOME"
  label="${library#*:}"
  refuses "${variable}" "not found below ${TEST_TMPDIR}/empty/include: .*apt-get install .*${label##*:}" \
    "${variable}=${TEST_TMPDIR}/empty" "@${label%:*}"
done

exit "$((failures != 0))"
