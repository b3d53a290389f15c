#!/bin/sh
# node-entrypoint.sh [join|start|run]: `join` joins once, `start` serves, `run` (the default) does both.
#
# The data directory is the node's identity: one that has joined never needs the token again. The token is
# read from a file (a mounted secret) and waited for, because it can be made only while the coordinator runs.
set -eu
data=${SHIMMER_NODE_DATA:-/data/node}
token_file=${SHIMMER_JOIN_TOKEN_FILE:-/run/secrets/join-token}

join() {
    [ ! -e "$data/node.json" ] || return 0
    until [ -s "$token_file" ]; do
        echo "waiting for a join token in $token_file; make one with: shimmer cluster invite" >&2
        sleep 5
    done
    # Settings that `join` keeps in node.json for later starts.
    set -- --data "$data" --listen 0.0.0.0:7421 --no-start
    [ -z "${SHIMMER_NODE_NAME:-}" ] || set -- "$@" --name "$SHIMMER_NODE_NAME"
    [ -z "${SHIMMER_NODE_ADVERTISE:-}" ] || set -- "$@" --advertise "$SHIMMER_NODE_ADVERTISE"
    [ -z "${SHIMMER_NODE_RAM:-}" ] || set -- "$@" --ram "$SHIMMER_NODE_RAM"
    [ -z "${SHIMMER_NODE_PACK:-}" ] || set -- "$@" --pack "$SHIMMER_NODE_PACK"
    shimmer-node join "$(cat "$token_file")" "$@"
}

case ${1:-run} in
join) join ;;
start) exec shimmer-node start --data "$data" ;;
run)
    join
    exec shimmer-node start --data "$data"
    ;;
*)
    echo "node-entrypoint.sh: unknown command $1; use join, start or run" >&2
    exit 2
    ;;
esac
