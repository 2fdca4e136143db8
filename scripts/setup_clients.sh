#!/bin/sh
# Install the clients that tests/clients runs into .clients: one Python environment for each
# tests/clients/requirements-NAME.txt, because they do not agree on versions, and one npm folder.
#
# Does nothing, and needs no network, for what its files describe already: a copy of them stands beside it.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
files=tests/clients
clients=.clients

say() { printf 'clients: %s\n' "$*"; }
fail() { printf 'clients: %s\n' "$*" >&2; exit 1; }

command -v npm >/dev/null || fail "npm is not installed; Claude Code, Codex and two SDKs come from it (Node.js 20 or newer)"

for requirements in "$files"/requirements-*.txt; do
    name=$(basename "$requirements" .txt)
    name=${name#requirements-}
    folder=$clients/$name
    cmp -s "$requirements" "$folder/installed.txt" && continue
    say "installing $name"
    rm -f "$folder/installed.txt"
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$requirements" ||
        fail "pip could not install $requirements; it needs a package index the first time"
    cp "$requirements" "$folder/installed.txt"
done

# npm runs no package's own install script: what is needed from them comes inside the packages.
folder=$clients/npm
if ! cmp -s "$files/package-lock.json" "$folder/installed.json"; then
    say "installing the npm clients"
    mkdir -p "$folder"
    rm -f "$folder/installed.json"
    cp "$files/package.json" "$files/package-lock.json" "$folder"
    npm ci --prefix "$folder" --ignore-scripts --no-audit --no-fund ||
        fail "npm could not install the clients; it needs a registry the first time"
    cp "$files/package-lock.json" "$folder/installed.json"
fi
