#!/usr/bin/env bash
# Decoding over nodes in the LAN lab (docs/lab.md, docs/performance.md): every machine has its own cable, disk
# rate and RAM. Needs root, a release build of shimmer, and lan-lab.
#
#   tests/bench/cluster.sh MODEL EXPERT_RAM NODES [DISK_READ[,DISK_READ…]] [RAM[,RAM…]]
#
# MODEL       a container, such as one made by `shimmer synth`
# EXPERT_RAM  RAM for experts of every machine, such as 450MiB
# NODES       how many nodes besides the coordinator; 0 measures one machine alone
# DISK_READ   bytes per second each disk reads: one for all, or the coordinator's and each node's; 0B = no limit
# RAM         RAM for experts of each node where they differ
#
# Further settings: RATE (Mbit/s, 1000), RTT (us, 300), RUNS (5), TOKENS (16), WARM (48), SHARE (auto), WORK (a directory
# on a disk whose reads can be limited), SHIMMER and LAN_LAB (the programs).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
model=$1 ram=$2 nodes=$3 disk=${4:-0B} rams=${5:-}
SHIMMER=${SHIMMER:-$here/target/release/shimmer}
LAN_LAB=${LAN_LAB:-$here/target/release/lan-lab}
WORK=${WORK:-$(mktemp -d -p "$here/target" cluster-bench-XXXX)}
export model ram nodes rams SHIMMER LAN_LAB WORK
export RUNS=${RUNS:-5} TOKENS=${TOKENS:-16} WARM=${WARM:-48} SHARE=${SHARE:-auto}
mkdir -p "$WORK"

inner() {
    local address=198.18.0.1 i node_ram token
    rm -rf "$WORK/cluster" "$WORK"/node*
    address=$("$LAN_LAB" exec 0 ip -4 -o addr show eth0 | awk '{print $4}' | cut -d/ -f1)
    local bench=("$SHIMMER" bench cluster --model "$model" --expert-ram "$ram" --nodes "$nodes" --runs "$RUNS"
        --tokens "$TOKENS" --warm-tokens "$WARM" --draft off --json)
    if ((nodes == 0)); then
        "$LAN_LAB" exec 0 "${bench[@]}" > "$WORK/result.json"
        return
    fi
    "$SHIMMER" cluster init --cluster "$WORK/cluster" --listen "$address:7420" > /dev/null
    token=$("$SHIMMER" cluster invite --cluster "$WORK/cluster" --uses "$nodes" 2> /dev/null)
    "$LAN_LAB" exec 0 "${bench[@]}" --cluster "$WORK/cluster" --local-share "$SHARE" > "$WORK/result.json" 2> "$WORK/bench.log" &
    local coordinator=$!
    for ((i = 1; i <= nodes; i++)); do
        node_ram=$(cut -d, -f"$i" <<< "${rams:-$ram}")
        (
            until "$LAN_LAB" exec "$i" "$SHIMMER" node join "$token" --data "$WORK/node$i" --name "node$i" \
                --ram "${node_ram:-$ram}" --threads 1 >> "$WORK/node$i.log" 2>&1; do
                kill -0 $coordinator 2> /dev/null || break
                sleep 0.5
            done
        ) &
    done
    wait $coordinator || { tail -5 "$WORK/bench.log" >&2; return 1; }
}

if [[ ${IN_LAB:-} ]]; then
    inner
    exit
fi
IN_LAB=1 "$LAN_LAB" up $((nodes > 0 ? nodes + 1 : 2)) --rate "${RATE:-1000}" --rtt "${RTT:-300}" \
    --disk-read "$disk" --disk-path "$WORK" -- "${BASH_SOURCE[0]}" "$@"
python3 - "$WORK/result.json" <<'PY' 2> /dev/null || cat "$WORK/result.json"
import json, sys
r = json.load(open(sys.argv[1]))
t = r["tokens_per_s"]
print(f'{r["nodes"]} nodes: {t["median"]:.3f} tokens/s [{t["min"]:.3f}..{t["max"]:.3f}], {r["ms_per_token"]["median"]:.1f} ms/token'
      f' (dense {r["dense_ms"]["median"]:.1f}, waiting {r["wait_ms"]["median"]:.1f}, here {r["local_ms"]["median"]:.1f}),'
      f' {r["messages_per_token"]["median"]:.1f} messages, of predicted {r["share_of_predicted"]}')
for w in (r["plan"] or {}).get("workers", []):
    print(f'  {w["worker"]["name"]}: {w["experts"]}+{w["replicas"]} experts, share {w["share"]:.2f}, disk {w["worker"]["rates"]["disk_bytes_per_s"]/1e6:.0f} MB/s, {w["advice"]}')
PY
