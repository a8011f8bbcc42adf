#!/bin/sh
# The git servers that the end-to-end tests start on 127.0.0.1: nginx and fcgiwrap in front of git-http-backend,
# OpenSSH's sshd, and git-lfs; and a C compiler, for the clock that the fault tests turn. As root on Debian or Ubuntu they
# are installed, with the account that git over SSH runs under; elsewhere this says what is missing. Nothing is
# started, and services that the packages bring are left as the system sets them up.
set -eu

PACKAGES="nginx-light fcgiwrap openssh-server openssh-client git-lfs gcc libc6-dev"
ACCOUNT=kakeya-test-git
PATH="$PATH:/usr/sbin:/sbin:/usr/local/sbin"

missing() {
  for program in nginx fcgiwrap sshd ssh ssh-keygen git git-lfs cc; do
    command -v "$program" >/dev/null 2>&1 || printf ' %s' "$program"
  done
  [ -x "$(git --exec-path)/git-http-backend" ] || printf ' git-http-backend'
  [ -x "$(git --exec-path)/git-daemon" ] || printf ' git-daemon'
}

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && [ -n "$(missing)" ]; then
  export DEBIAN_FRONTEND=noninteractive
  # A machine that only tests needs no web server of its own on port 80, nor an SSH server on 22.
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
  fi
  apt-get update -qq
  # shellcheck disable=SC2086 # a list of packages
  apt-get install -y -qq --no-install-recommends $PACKAGES >/dev/null
fi

absent=$(missing)
if [ -n "$absent" ]; then
  echo "missing for the end-to-end tests:$absent" >&2
  echo "  Debian, Ubuntu: apt-get install -y $PACKAGES git" >&2
  echo "  macOS: brew install nginx fcgiwrap git-lfs (sshd and git come with the system)" >&2
  exit 1
fi

if [ "$(id -u)" = 0 ]; then
  # sshd separates its privileges into this folder; the packages' service would make it.
  mkdir -p /run/sshd && chmod 755 /run/sshd
  # An account without a password that owns nothing; the tests let it run git and nothing else.
  id "$ACCOUNT" >/dev/null 2>&1 ||
    useradd --system --no-create-home --home-dir / --shell /bin/sh --password '*' "$ACCOUNT"
fi
