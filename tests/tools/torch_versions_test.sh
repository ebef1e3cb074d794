#!/usr/bin/env bash
# tools/bootstrap --torch and tools/test --torch against stand-ins for pip and Bazel: which
# versions are refused and how, what is installed where, and what Bazel is told.
set -euo pipefail

clone="${TEST_TMPDIR}/clone"
stubs="${TEST_TMPDIR}/stubs"
log="${TEST_TMPDIR}/log"
out="${TEST_TMPDIR}/out"
mkdir -p "${clone}/tools" "${clone}/third_party/libtorch" "${stubs}"
for file in tools/{bootstrap,requirements.txt,summarize_tests,test} third_party/libtorch/locate.bzl; do
  cp "$(readlink -f "${file}")" "${clone}/${file}"
done
unset COMPOSABLE_VENV TORCH_HOME
export COMPOSABLE_CACHE="${TEST_TMPDIR}/cache" COMPOSABLE_PYTHON="${stubs}/python"
export STUBS="${stubs}" LOG="${log}" PATH="${stubs}:${PATH}"

stub() {
  { echo '#!/usr/bin/env bash'; cat; } >"${stubs}/$1"
  chmod +x "${stubs}/$1"
}
stub dpkg-query <<'END'
for package in "${@:4}"; do echo "installed ${package}"; done
END
# `-m venv FOLDER` makes a venv; its pip knows no 2.14.9.
stub python <<'END'
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && ln -s "${STUBS}/python" "$3/bin/python3" ;;
  "-m pip install "*) grep '==' "${@: -1}" >>"${LOG}"; ! grep -q '2\.14\.9' "${@: -1}" ;;
esac
END
stub bazel <<'END'
echo "bazel $*" >>"${LOG}"
END

fail() {
  printf 'FAILED: %s\n' "$1" >&2
  cat "${log}" "${out}" >&2 2>/dev/null || true
  exit 1
}
tool() {
  : >"${log}"
  "${clone}/tools/$1" "${@:2}" >"${out}" 2>&1
}
# refuses PATTERN TOOL ARGS...: one line that matches, and nothing is done.
refuses() {
  local pattern="$1"
  shift
  tool "$@" && fail "not refused: $*"
  [[ "$(wc -l <"${out}")" == 1 ]] && grep -qE -- "${pattern}" "${out}" || fail "no line '${pattern}': $*"
  [[ ! -s "${log}" && ! -e "${COMPOSABLE_CACHE}" ]] || fail "did something: $*"
}

# --- What is refused ----------------------------------------------------------

for version in 2.10.0 2.16.0 1.13.0 3.12.0; do
  for tool in bootstrap test; do
    refuses "^bootstrap: --torch=${version} is not supported \(supported: 2\.11 to 2\.15\)$" \
      "${tool}" "--torch=${version}"
  done
done
for version in "" 2.15 newest 2.15.0+cpu 2.15.0.0; do
  refuses "^bootstrap: --torch='${version//+/\\+}' is no version: write it as on PyPI, such as --torch=2\.11\.0" \
    bootstrap "--torch=${version}"
done
TORCH_HOME=/opt/libtorch refuses \
  "--torch=2\.15\.0 and TORCH_HOME=/opt/libtorch both choose a LibTorch: leave one out" \
  bootstrap --torch=2.15.0
COMPOSABLE_VENV=/opt/venv refuses \
  "--torch=2\.15\.0 and COMPOSABLE_VENV=/opt/venv both choose a LibTorch: leave one out" \
  bootstrap --torch=2.15.0
refuses "unknown argument '--troch=2.15.0' \(known: --check, --torch=VERSION, --workshop, --help\)" \
  bootstrap --troch=2.15.0
refuses "tools/test: '2.15.0': write options as --name=value" test --torch 2.15.0

# --- What is installed --------------------------------------------------------

rc="${clone}/user.bazelrc"
tool bootstrap || fail "the default"
grep -qx 'torch==2.11.0' "${log}" || fail "the default is not 2.11.0"
cp "${rc}" "${TEST_TMPDIR}/default_rc"
default="$(sed -n 's/^common --repo_env=COMPOSABLE_VENV=//p' "${rc}")"

tool bootstrap --torch=2.15.0 --check && fail "--check found a LibTorch that is not there"
grep -q "missing: ${COMPOSABLE_CACHE}/venv-2.15.0-" "${out}" || fail "--check does not name the venv"

tool bootstrap --torch=2.14.9 && fail "succeeded although pip failed"
grep -q 'pip could not install torch==2.14.9 numpy' "${out}" || fail "pip's failure is not told"
grep -q 'torch2.14.9' "${rc}" && fail "half a venv in user.bazelrc"

tool bootstrap --torch=2.15.0 || fail "2.15.0"
grep -qx 'torch==2.15.0' "${log}" || fail "pip was not asked for 2.15.0"
other="$(sed -n 's/^common:torch2.15.0 --repo_env=COMPOSABLE_VENV=//p' "${rc}")"
[[ -x "${other}/bin/python3" && "${other}" != "${default}" ]] || fail "no venv of its own"
grep -q numpy "${other}/requirements.txt" || fail "no numpy"
grep -qx "build:torch2.15.0 --test_env=COMPOSABLE_PYTHON=${other}/bin/python3" "${rc}" || fail "no Python"
grep -qx "build:torch2.15.0 --platform_suffix=torch2.15.0" "${rc}" || fail "no folders of its own"
grep -v ':torch2.15.0 ' "${rc}" | cmp -s - "${TEST_TMPDIR}/default_rc" || fail "the default has changed"

# Both stay, and a second run does nothing.
cp "${rc}" "${TEST_TMPDIR}/both_rc"
for arguments in "" --torch=2.15.0 --torch=2.11.0; do
  tool bootstrap ${arguments} || fail "again: ${arguments}"
  [[ ! -s "${log}" && ! -s "${out}" ]] || fail "did something again: ${arguments}"
  cmp -s "${rc}" "${TEST_TMPDIR}/both_rc" || fail "user.bazelrc has changed: ${arguments}"
done

# --- What Bazel is told -------------------------------------------------------

# tells EXPECTED ARGS...: what stands between `bazel test ... json` and the end.
tells() {
  tool test "${@:2}" || true # the stand-in writes no results
  local told
  told="$(sed -n 's/^bazel test .*--build_event_json_file=[^ ]* *//p' "${log}")"
  [[ "${told}" == "$1" ]] || fail "expected '$1', got '${told}' for: ${*:2}"
}
tells "-- //..."
tells "-- //..." --torch=2.11.0
tells "--config=torch2.15.0 --platform_suffix=torch2.15.0 -- //..." --torch=2.15.0
tells "--config=torch2.15.0 --config=asan --nocache --platform_suffix=torch2.15.0-asan -- //state/..." \
  //state/... --config=asan --torch=2.15.0 --nocache

# A new list of requirements is a new venv; the old one is no longer offered.
echo "six" >>"${clone}/tools/requirements.txt"
tool bootstrap || fail "new requirements"
grep -q 'torch2.15.0' "${rc}" && fail "a venv of other requirements is offered"
exit 0
