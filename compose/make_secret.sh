#!/bin/sh
# Makes the fleet's own secret, once: whoever reaches NATS, Redis or kv_index must show it. Files for
# these servers and for their clients go to the folder given; containers that mount it can read them.
set -eu
folder=$1
test ! -s "$folder/secret" || exit 0
secret=$(head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n')
printf 'include "../nats.conf"\nhttp: "127.0.0.1:8222"\nauthorization {token: "%s"}\n' "$secret" > "$folder/nats.conf"
printf 'requirepass %s\n' "$secret" > "$folder/redis.conf"
printf '%s\n' "$secret" > "$folder/secret"
