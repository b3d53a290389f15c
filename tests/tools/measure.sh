#!/bin/sh
# Repeats every measurement of docs/performance.md: tests/tools/measure.sh DIR [SHIMMER]
# DIR needs 17 GB; the models stay there, results are JSON files in DIR/results. Nothing else should run meanwhile.
set -eu
dir=${1:?usage: measure.sh DIR [SHIMMER]}
shimmer=${2:-target/release/shimmer}
results=$dir/results
mkdir -p "$results"

# run NAME ARGUMENTS…: one measurement, kept when it succeeds; what is there already is not repeated.
run() {
    name=$1
    shift
    if [ -e "$results/$name.json" ]; then return; fi
    echo "$name: shimmer $*" >&2
    if "$shimmer" "$@" --json >"$results/$name.part"; then
        mv "$results/$name.part" "$results/$name.json"
    else
        echo "$name failed" >&2
    fi
}

for router in uniform zipf; do
    if [ ! -d "$dir/$router" ]; then "$shimmer" synth --to "$dir/$router" --router "$router"; fi
done
# A quarter of 320 experts of 21,233,664 bytes.
quarter=1620MiB

run mem bench mem
run gemv bench gemv
run disk bench disk --model "$dir/uniform"
for router in uniform zipf; do
    model=$dir/$router
    run "decode-$router" bench decode --model "$model"
    run "decode-$router-quarter" bench decode --model "$model" --expert-ram $quarter --cold
    run "prefill-$router" bench prefill --model "$model" --tokens 512
    run "prefill-$router-quarter" bench prefill --model "$model" --tokens 512 --expert-ram $quarter --cold
done
run sweep-resident bench sweep --model "$dir/zipf"
run sweep-quarter bench sweep --model "$dir/zipf" --expert-ram $quarter --cold --tokens 16
run sweep-slow-disk bench sweep --model "$dir/zipf" --expert-ram $quarter --cold --tokens 4 --disk-limit 200MB
run first-token run --model "$dir/uniform" --raw --prompt w0 --max-tokens 1 --greedy
if [ ! -d "$dir/headers" ]; then
    "$shimmer" synth --to "$dir/headers" --preset glm-5.2-full --mtp --headers-only --shard-size 3GiB
fi
run plan plan --model "$dir/headers"
