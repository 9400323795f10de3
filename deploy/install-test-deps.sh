#!/usr/bin/env bash
# Installs what the tests need and is missing: Go is checked, a C compiler (for
# the race detector), redis-server, PostgreSQL and libfaketime (which steps Redis's
# clock) are installed from Debian's packages. The tests start servers of their own from these programs, on free
# ports of 127.0.0.1 and in temporary folders; a server that the packages start
# is neither needed nor touched.
set -euo pipefail

need_go=1.26

fail() {
  echo "install-test-deps: $*" >&2
  exit 1
}

command -v go >/dev/null || fail "Go is missing; install Go $need_go or newer from https://go.dev/dl/"
have_go=$(go env GOVERSION) || fail "go does not run; install Go $need_go or newer from https://go.dev/dl/"
have_go=${have_go#go}
oldest=$(printf '%s\n%s\n' "$need_go" "${have_go%%[- ]*}" | sort -V | head -n 1)
[ "$oldest" = "$need_go" ] || fail "Go $have_go is too old; install Go $need_go or newer from https://go.dev/dl/"

have_c() {
  command -v gcc >/dev/null && echo '#include <stdlib.h>' | gcc -E - >/dev/null 2>&1
}

have_postgres() {
  command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null
}

have_redis() {
  command -v redis-server >/dev/null && command -v redis-cli >/dev/null
}

have_faketime() {
  compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null
}

missing() {
  have_c || echo gcc libc6-dev
  have_redis || echo redis-server
  have_postgres || echo postgresql
  have_faketime || echo faketime
}

packages=$(missing | tr '\n' ' ')
packages=${packages% }
[ -n "$packages" ] || exit 0

command -v apt-get >/dev/null || fail "missing: $packages (names of Debian packages); install them with this system's package manager"
if [ "$(id -u)" = 0 ]; then
  apt() { DEBIAN_FRONTEND=noninteractive apt-get "$@"; }
elif command -v sudo >/dev/null; then
  apt() { sudo DEBIAN_FRONTEND=noninteractive apt-get "$@"; }
else
  fail "missing: $packages; run as root: apt-get install $packages"
fi

echo "installing $packages"
apt update -q || echo "install-test-deps: apt-get update failed; trying with the lists that are here" >&2
# shellcheck disable=SC2086 # a list of words
apt install -q -y --no-install-recommends $packages || fail "apt-get could not install $packages; install them by hand"

packages=$(missing | tr '\n' ' ')
[ -z "$packages" ] || fail "still missing after the installation: $packages"
