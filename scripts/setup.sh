#!/bin/sh
# Install Farspan into .venv: `setup.sh EXTRA [GROUP]`, an extra and perhaps a dependency group of pyproject.toml.
#
# Does nothing, and needs no network, when the same dependencies are installed already: a stamp file holds a
# hash of every dependency that pyproject.toml names.
set -eu
cd "$(dirname "$0")/.."

extra=$1
group=${2:-}
python=${PYTHON:-python3}
venv=.venv
stamp=$venv/.farspan-$extra${group:+-$group}

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "$python is not installed; Farspan needs Python 3.11 or newer"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: Farspan needs 3.11 or newer (choose one with PYTHON=/path/to/python)"

# Debian's python3 comes without venv; root can add it, anybody else is told how.
make_venv() {
    "$python" -m venv "$venv" && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    say "installing python3-venv"
    apt-get update -q && apt-get install -q -y python3-venv && "$python" -m venv --clear "$venv"
}

wanted=$("$python" scripts/dependencies.py hash)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi

started=$(date +%s)
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    say "creating $venv with $("$python" --version)"
    make_venv || fail "cannot create $venv; on Debian and Ubuntu: apt install python3-venv"
fi

# The pin of torch is named beside the extra: an open requirement resolves to a CUDA build of several GB.
set -- "$("$python" scripts/dependencies.py torch)" --editable ".[$extra]"
if [ -n "$group" ]; then
    "$venv/bin/python" scripts/dependencies.py can-install-groups ||
        "$venv/bin/python" -m pip install --disable-pip-version-check 'pip>=25.1'
    set -- "$@" --group "$group"
fi
say "installing $* (the first time: 2 GB and a minute or two)"
"$venv/bin/python" -m pip install --disable-pip-version-check "$@" ||
    fail "pip could not install the packages; it needs a package index the first time"

say "$("$venv/bin/python" scripts/dependencies.py describe-torch)"
printf '%s\n' "$wanted" | tee "$stamp" >"$venv/.farspan-$extra"
say "done after $(($(date +%s) - started)) s"
