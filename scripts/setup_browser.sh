#!/bin/sh
# Install Chromium, with which tests/browser looks at the page. Does nothing, and needs no network, when it is there.
set -eu

fail() { printf 'browser: %s\n' "$*" >&2; exit 1; }

command -v chromium >/dev/null && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "chromium is not installed; on Debian: apt install chromium"
printf 'browser: installing chromium\n'
apt-get update -q && apt-get install -q -y --no-install-recommends chromium ||
    fail "apt-get could not install chromium; it needs a package mirror the first time"
