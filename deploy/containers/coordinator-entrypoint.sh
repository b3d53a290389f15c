#!/bin/sh
# Makes the cluster at the first start, then serves. Arguments go to `shimmer serve`.
set -eu
: "${SHIMMER_CLUSTER:=/data/cluster}"
export SHIMMER_CLUSTER
[ -e "$SHIMMER_CLUSTER/cluster.json" ] ||
    shimmer cluster init --cluster "$SHIMMER_CLUSTER" --listen 0.0.0.0:7420
exec shimmer serve "$@"
