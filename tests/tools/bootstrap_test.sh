#!/usr/bin/env bash
# tools/bootstrap against stand-ins for apt-get, dpkg-query and Python: what it installs,
# that it resumes, that it does nothing the second time, and what it writes for Bazel.
set -euo pipefail

clone="${TEST_TMPDIR}/clone"
stubs="${TEST_TMPDIR}/stubs"
log="${TEST_TMPDIR}/log"
mkdir -p "${clone}/tools" "${stubs}"
cp "$(readlink -f tools/bootstrap)" "$(readlink -f tools/requirements.txt)" "${clone}/tools/"
unset COMPOSABLE_VENV TORCH_HOME
export COMPOSABLE_CACHE="${TEST_TMPDIR}/cache" COMPOSABLE_PYTHON="${stubs}/python"
export STUBS="${stubs}" LOG="${log}" PATH="${stubs}:${PATH}"

stub() {
  { echo '#!/usr/bin/env bash'; cat; } >"${stubs}/$1"
  chmod +x "${stubs}/$1"
}

stub id <<'END'
cat "${STUBS}/uid" 2>/dev/null || echo 0
END
stub dpkg </dev/null
# Installed is what lies in ${STUBS}/installed.
stub dpkg-query <<'END'
for package in "${@:4}"; do
  [[ ! -e "${STUBS}/installed/${package}" ]] || echo "installed ${package}"
done
END
# Knows packages only after an update.
stub apt-get <<'END'
echo "apt-get $*" >>"${LOG}"
if [[ " $* " == *" update "* ]]; then touch "${STUBS}/lists"; exit; fi
[[ -e "${STUBS}/lists" ]] || exit 100
mkdir -p "${STUBS}/installed"
for word in "$@"; do [[ "${word}" == -* ]] || touch "${STUBS}/installed/${word}"; done
END
# `-m venv FOLDER` makes a venv whose pip fails as long as ${STUBS}/offline is there.
stub python <<'END'
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && ln -s "${STUBS}/python" "$3/bin/python3" ;;
  "-m pip install "*) echo "pip $*" >>"${LOG}"; [[ ! -e "${STUBS}/offline" ]] ;;
esac
END
stub bazel </dev/null # neither at /usr/bin nor Debian's

fail() {
  printf 'FAILED: %s\n' "$1" >&2
  cat "${log}" "${TEST_TMPDIR}/out" >&2 2>/dev/null || true
  exit 1
}
bootstrap() {
  : >"${log}"
  "${clone}/tools/bootstrap" "$@" >"${TEST_TMPDIR}/out" 2>&1
}

touch "${stubs}/offline"

bootstrap --check && fail "--check found nothing missing on an empty machine"
[[ ! -s "${log}" && ! -e "${COMPOSABLE_CACHE}" ]] || fail "--check changed something"

# Not root, no sudo: one line with the command. (PATH has this machine's sudo, if any, hidden.)
echo 1000 >"${stubs}/uid"
mkdir -p "${TEST_TMPDIR}/tools_only"
for tool in bash cut cat dirname env flock grep id mkdir mv readlink rm sed sha256sum tr; do
  ln -sf "$(type -P "${tool}")" "${TEST_TMPDIR}/tools_only/${tool}"
done
PATH="${stubs}:${TEST_TMPDIR}/tools_only" bootstrap && fail "went on without root"
[[ "$(grep -c 'run as root: apt-get update && apt-get install .*libabsl-dev' "${TEST_TMPDIR}/out")" == 1 ]] ||
  fail "the line to run as root is not said"
rm "${stubs}/uid"

# A first run: lists are missing, so there is one update; then pip fails.
bootstrap && fail "succeeded although pip failed"
[[ "$(grep -c ' update' "${log}")" == 1 ]] || fail "not exactly one apt-get update"
grep -q 'install .*libgloo-dev' "${log}" || fail "packages were not installed"
grep -q 'bazel-bootstrap' "${log}" && fail "Debian's Bazel is installed beside another one"
grep -q 'pip could not install torch==2.11.0' "${TEST_TMPDIR}/out" || fail "pip's failure is not told"
[[ ! -e "${clone}/user.bazelrc" ]] || fail "user.bazelrc was written before all was there"

# It resumes where it was.
rm "${stubs}/offline"
bootstrap || fail "did not resume"
grep -q 'apt-get' "${log}" && fail "installed packages again"
grep -q 'pip' "${log}" || fail "pip was not run again"

# user.bazelrc
rc="${clone}/user.bazelrc"
venv="$(sed -n 's/^common --repo_env=COMPOSABLE_VENV=//p' "${rc}")"
[[ -x "${venv}/bin/python3" && "${venv}" == "${COMPOSABLE_CACHE}"/* ]] || fail "no venv in user.bazelrc"
grep -q -- "--test_env=COMPOSABLE_PYTHON=${venv}/bin/python3" "${rc}" || fail "no COMPOSABLE_PYTHON"
grep -q -- "--disk_cache=${COMPOSABLE_CACHE}/" "${rc}" || fail "no disk cache"
grep -q override_repository "${rc}" && fail "Debian's overrides for another Bazel"

# A second run does nothing, and is quick.
cp "${rc}" "${TEST_TMPDIR}/rc"
start="${EPOCHREALTIME/./}"
bootstrap || fail "the second run failed"
micros="$((${EPOCHREALTIME/./} - start))"
[[ ! -s "${log}" && ! -s "${TEST_TMPDIR}/out" ]] || fail "the second run did something"
cmp -s "${rc}" "${TEST_TMPDIR}/rc" || fail "user.bazelrc has changed"
((micros < 2000000)) || fail "the second run took ${micros} us"
bootstrap --check || fail "--check found something missing"

# What only tools/presubmit needs comes when it is asked for.
bootstrap --workshop || fail "--workshop"
grep -q 'install .*clang-format-14 clang-tidy-14' "${log}" || fail "--workshop did not install clang-tidy"
bootstrap --workshop || fail "--workshop again"
[[ ! -s "${log}" ]] || fail "--workshop installed again"

# Another clone shares the venv.
mkdir -p "${TEST_TMPDIR}/other" && cp -r "${clone}/tools" "${TEST_TMPDIR}/other/"
: >"${log}"
"${TEST_TMPDIR}/other/tools/bootstrap" || fail "a second clone"
[[ ! -s "${log}" ]] || fail "a second clone installed something"
grep -q -- "COMPOSABLE_VENV=${venv}" "${TEST_TMPDIR}/other/user.bazelrc" || fail "venv not shared"

# A venv without its stamp was interrupted, and is made anew; two clones do so once.
rm "${venv}/.composable-complete"
: >"${log}"
"${TEST_TMPDIR}/other/tools/bootstrap" 2>/dev/null &
"${clone}/tools/bootstrap" 2>/dev/null
wait "$!" || fail "the other of two at once"
[[ "$(grep -c pip "${log}")" == 1 ]] || fail "two at once ran pip $(grep -c pip "${log}") times"

# With TORCH_HOME there is no need for a venv.
COMPOSABLE_CACHE="${TEST_TMPDIR}/cache2" TORCH_HOME=/opt/libtorch bootstrap || fail "TORCH_HOME"
grep -q 'repo_env=TORCH_HOME=/opt/libtorch' "${rc}" || fail "TORCH_HOME is not in user.bazelrc"
[[ ! -s "${log}" ]] || fail "made a venv although TORCH_HOME is set"

# Debian's Bazel gets what its built-in rules need.
if [[ -e /usr/share/bazel/build-label.txt ]]; then
  rm "${stubs}/bazel"
  bootstrap || fail "Debian's Bazel"
  grep -q 'install .*bazel-bootstrap bazel-rules-java' "${log}" || fail "bazel is not installed"
  grep -q -- "--override_repository=rules_cc=${clone}/tools/debian_bazel/rules_cc" "${rc}" ||
    fail "no override for rules_cc"
fi
