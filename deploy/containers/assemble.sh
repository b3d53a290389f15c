#!/bin/sh
# Lays out an image: assemble.sh DEST BINARY...
# DEST gets the binaries, the shared libraries they name, and a static busybox for the entrypoint and the
# health check. Nothing else: no package manager, no other program.
set -eu
[ $# -ge 2 ] || { echo "usage: assemble.sh DEST BINARY..." >&2; exit 2; }
dest=$1
shift
busybox=${BUSYBOX:-/bin/busybox}

mkdir -p "$dest/bin" "$dest/etc" "$dest/proc" "$dest/dev" "$dest/sys" "$dest/tmp"
chmod 1777 "$dest/tmp"
if ldd "$busybox" >/dev/null 2>&1; then
    echo "assemble.sh: $busybox is not static; install busybox-static" >&2
    exit 1
fi
cp "$busybox" "$dest/bin/busybox"
for applet in sh cat nc sleep wget; do ln -sf busybox "$dest/bin/$applet"; done

for binary in "$@"; do
    cp "$binary" "$dest/bin/"
    # Both forms of a line: "libc.so.6 => /lib/libc.so.6 (0x...)" and "/lib64/ld-linux.so.2 (0x...)".
    ldd "$binary" | grep -o '/[^ ]*' | while read -r library; do
        mkdir -p "$dest$(dirname "$library")"
        cp -L "$library" "$dest$library"
    done
done

# glibc has had its resolver inside since 2.34; this says to look into /etc/hosts first.
echo 'hosts: files dns' >"$dest/etc/nsswitch.conf"
echo 'shimmer:x:65532:65532:shimmer:/data:/bin/false' >"$dest/etc/passwd"
echo 'shimmer:x:65532:' >"$dest/etc/group"
