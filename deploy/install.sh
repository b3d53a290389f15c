#!/bin/sh
# Installs Shimmer on a Linux machine with systemd. See --help.
set -eu

usage() {
    cat <<'END'
usage: install.sh (--coordinator | --node)... SOURCE [OPTION]...
       install.sh --uninstall [--purge] [OPTION]...

Installs programs, users, directories and systemd units; running it again changes only what differs.
Nothing is started, joined or opened in a firewall: what to do next is printed.

What:
  --coordinator        the program shimmer and its unit
  --node               the program shimmer-node and its unit
Source (default: target/dist of the source tree this script is in):
  --from DIR           directory with the programs, such as target/release
  --archive FILE       release archive (.tar.gz) with the programs, checked against --sha256 or FILE.sha256
  --archive URL        the same from https://; --sha256 is then required
  --sha256 HEX         SHA-256 of the archive, from a place you trust
Options:
  --lan-only           units talk to private addresses only (systemd/lan-only.conf)
  --prefix DIR         programs go to DIR/bin [default: /usr/local]
  --root DIR           install into this tree instead of the running system: no users, no systemctl
  --dry-run            print what would be done and change nothing
  --uninstall          remove programs and units; settings, state and users stay
  --purge              with --uninstall: also remove settings, state (the cluster's CA, the node's identity
                       and records) and users
  -h, --help           this text
END
}

die() {
    printf 'install.sh: %s\n' "$*" >&2
    exit "${code:-1}"
}
misuse() {
    code=2
    die "$*; see install.sh --help"
}
say() { printf '%s\n' "$*"; }

# Runs a command that changes something, or prints it.
run() {
    if [ "$dry_run" = 1 ]; then
        say "would run: $*"
    else
        "$@"
    fi
}

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
coordinator=0 node=0 dry_run=0 uninstall=0 purge=0 lan_only=0
from='' archive='' sha256='' prefix=/usr/local root=''
scratch=''
trap '[ -z "$scratch" ] || rm -rf "$scratch"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

parse() {
    while [ $# -gt 0 ]; do
        case $1 in
        --from | --archive | --sha256 | --prefix | --root)
            [ $# -ge 2 ] && [ -n "$2" ] || misuse "$1 needs a value"
            case $1 in
            --from) from=$2 ;;
            --archive) archive=$2 ;;
            --sha256) sha256=$2 ;;
            --prefix) prefix=${2%/} ;;
            *) root=${2%/} && [ -n "$root" ] || misuse "--root $2 is the running system; leave it out" ;;
            esac
            shift
            ;;
        --coordinator) coordinator=1 ;;
        --node) node=1 ;;
        --lan-only) lan_only=1 ;;
        --dry-run) dry_run=1 ;;
        --uninstall) uninstall=1 ;;
        --purge) purge=1 ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) misuse "unknown argument $1" ;;
        esac
        shift
    done
    # Paths stand in a unit file and in sed: nothing that either would read as more than a path.
    case $prefix in
    *[!A-Za-z0-9/._-]*) misuse "--prefix $prefix has characters other than letters, digits and / . _ -" ;;
    /*) ;;
    *) misuse "--prefix $prefix is not an absolute path" ;;
    esac
    case $root in
    '' | /*) ;;
    *) misuse "--root $root is not an absolute path" ;;
    esac
    if [ "$uninstall" = 1 ]; then
        [ -z "$from$archive$sha256" ] && [ "$coordinator$node$lan_only" = 000 ] ||
            misuse "--uninstall takes only --purge, --prefix, --root and --dry-run"
    else
        [ "$purge" = 0 ] || misuse "--purge goes with --uninstall"
        [ "$coordinator$node" != 00 ] || misuse "say what to install: --coordinator, --node or both"
        [ -z "$from" ] || [ -z "$archive" ] || misuse "--from and --archive exclude each other"
        [ -z "$sha256" ] || [ -n "$archive" ] || misuse "--sha256 goes with --archive"
        case $sha256 in
        *[!0-9a-fA-F]*) misuse "--sha256 is not hexadecimal" ;;
        esac
        [ -z "$sha256" ] || [ "${#sha256}" = 64 ] || misuse "--sha256 does not have 64 digits"
    fi
}

check_system() {
    [ "$(uname -s)" = Linux ] ||
        die "this is $(uname -s), not Linux; see deploy/macos.md and deploy/windows.md"
    [ -z "$root" ] || return 0
    [ -d /run/systemd/system ] || [ "$dry_run" = 1 ] ||
        die "systemd does not run this machine; copy the programs to $prefix/bin and start them by hand"
    [ "$(id -u)" = 0 ] || [ "$dry_run" = 1 ] || die "run it as root, or with --dry-run or --root DIR"
}

make_scratch() { [ -n "$scratch" ] || scratch=$(mktemp -d); }

# Sets `archive` to a local file whose checksum was found right.
fetch_archive() {
    case $archive in
    https://*)
        [ -n "$sha256" ] || misuse "an archive from the network needs --sha256"
        make_scratch
        say "fetching $archive"
        if command -v curl >/dev/null; then
            curl --proto '=https' --proto-redir '=https' -fsSL -o "$scratch/archive" -- "$archive"
        elif command -v wget >/dev/null; then
            wget -q --https-only -O "$scratch/archive" -- "$archive"
        else
            die "neither curl nor wget is installed; fetch $archive by hand"
        fi || die "cannot fetch $archive"
        archive=$scratch/archive
        ;;
    *://*) misuse "an archive is a file or an https:// address, not $archive" ;;
    esac
    [ -f "$archive" ] || die "$archive is not a file"
    if [ -z "$sha256" ]; then
        [ -f "$archive.sha256" ] || misuse "give --sha256 HEX or put $archive.sha256 beside the archive"
        sha256=$(cut -d ' ' -f 1 <"$archive.sha256" | head -n 1)
    fi
    found=$(sha256sum <"$archive" | cut -d ' ' -f 1)
    [ "$found" = "$(printf %s "$sha256" | tr A-F a-f)" ] ||
        die "$archive has SHA-256 $found, not $sha256; it is damaged or not what it claims to be"
}

# Takes the programs, and nothing else, out of the archive into the scratch directory.
unpack() {
    make_scratch
    tar -tzf "$archive" >"$scratch/list" || die "$archive is not a .tar.gz archive"
    for program in $programs; do
        member=$(grep -E "^(\./)?([A-Za-z0-9._-]+/)?$program\$" "$scratch/list") ||
            die "$archive does not hold $program, at the top or in one directory"
        [ "$(printf '%s\n' "$member" | wc -l)" = 1 ] || die "$archive holds $program more than once"
        tar -xzOf "$archive" -- "$member" >"$scratch/$program" || die "cannot read $member from $archive"
        chmod 0755 "$scratch/$program"
    done
    from=$scratch
}

# The programs exist, run on this machine and are what they should be.
check_programs() {
    for program in $programs; do
        [ -f "$from/$program" ] ||
            die "$from/$program is missing; build it with: cargo build --profile dist --workspace"
        version=$("$from/$program" --version 2>/dev/null) ||
            die "$from/$program does not run on this machine ($(uname -m))"
        case $version in
        "$program "*) say "source: $version" ;;
        *) die "$from/$program calls itself \"$version\"" ;;
        esac
    done
}

# put MODE SOURCE TARGET: copies unless the same is there. The new file replaces the old one at once, so that
# a running program keeps the one it has.
put() {
    if [ -f "$root$3" ] && cmp -s "$2" "$root$3"; then
        say "unchanged: $3"
        return 0
    fi
    if [ "$dry_run" = 1 ]; then
        say "would install: $3"
        return 0
    fi
    mkdir -p "$root$(dirname "$3")"
    cp "$2" "$root$3.new"
    chmod "$1" "$root$3.new"
    mv -f "$root$3.new" "$root$3"
    say "installed: $3"
}

# put_unit NAME: the unit with the path of its program.
put_unit() {
    make_scratch
    sed "s|^ExecStart=/usr/local/bin/|ExecStart=$prefix/bin/|" "$here/systemd/$1" >"$scratch/$1"
    put 0644 "$scratch/$1" "/etc/systemd/system/$1"
    if [ "$lan_only" = 1 ]; then
        put 0644 "$here/systemd/lan-only.conf" "/etc/systemd/system/$1.d/lan-only.conf"
    fi
}

install_all() {
    programs=''
    [ "$coordinator" = 0 ] || programs="$programs shimmer"
    [ "$node" = 0 ] || programs="$programs shimmer-node"
    if [ -n "$archive" ]; then
        fetch_archive
        unpack
    fi
    [ -n "$from" ] || from=$here/../target/dist
    check_programs

    for program in $programs; do put 0755 "$from/$program" "$prefix/bin/$program"; done
    for program in $programs; do
        put 0644 "$here/systemd/$program.sysusers" "/usr/lib/sysusers.d/$program.conf"
        put 0644 "$here/systemd/$program.tmpfiles" "/usr/lib/tmpfiles.d/$program.conf"
        if [ -z "$root" ]; then
            run systemd-sysusers "/usr/lib/sysusers.d/$program.conf"
            run systemd-tmpfiles --create "/usr/lib/tmpfiles.d/$program.conf"
        fi
        put_unit "$program.service"
    done
    if [ "$coordinator" = 1 ]; then
        if [ -e "$root/etc/shimmer/shimmer.env" ]; then
            say "kept: /etc/shimmer/shimmer.env"
        else
            put 0644 "$here/systemd/shimmer.env.example" /etc/shimmer/shimmer.env
        fi
    fi
    [ -n "$root" ] || run systemctl daemon-reload
    next_steps
}

next_steps() {
    say ""
    if [ "$coordinator" = 1 ]; then
        say "coordinator: set the model's directory in /etc/shimmer/shimmer.env, then"
        say "  sudo -u shimmer $prefix/bin/shimmer cluster init --cluster /var/lib/shimmer/cluster"
        say "  systemctl enable --now shimmer"
        say "  sudo -u shimmer $prefix/bin/shimmer cluster invite --cluster /var/lib/shimmer/cluster"
    fi
    if [ "$node" = 1 ]; then
        say "node: with a token from the coordinator, while it runs,"
        join="$prefix/bin/shimmer-node join TOKEN --data /var/lib/shimmer-node --no-start"
        say "  sudo -u shimmer-node $join"
        say "  systemctl enable --now shimmer-node"
    fi
    say "After an upgrade: systemctl try-restart shimmer shimmer-node"
    say "Ports to open towards the LAN are in deploy/README.md."
}

remove() {
    [ -e "$root$1" ] || [ -L "$root$1" ] || return 0
    run rm -rf -- "$root$1"
    [ "$dry_run" = 1 ] || say "removed: $1"
}

uninstall_all() {
    for program in shimmer shimmer-node; do
        if [ -z "$root" ] && [ -e "/etc/systemd/system/$program.service" ]; then
            run systemctl disable --now "$program.service"
        fi
        remove "/etc/systemd/system/$program.service"
        remove "/etc/systemd/system/$program.service.d/lan-only.conf"
        [ "$dry_run" = 1 ] || rmdir "$root/etc/systemd/system/$program.service.d" 2>/dev/null || true
        remove "$prefix/bin/$program"
        remove "/usr/lib/sysusers.d/$program.conf"
        remove "/usr/lib/tmpfiles.d/$program.conf"
    done
    [ -n "$root" ] || run systemctl daemon-reload
    if [ "$purge" = 0 ]; then
        say "kept: /etc/shimmer, /var/lib/shimmer, /var/lib/shimmer-node and the users; --purge removes them"
        return 0
    fi
    for dir in /etc/shimmer /var/lib/shimmer /var/lib/shimmer-node /var/cache/shimmer; do remove "$dir"; done
    [ -z "$root" ] || return 0
    for user in shimmer shimmer-node; do
        if id "$user" >/dev/null 2>&1; then run userdel "$user"; fi
    done
}

parse "$@"
check_system
if [ "$uninstall" = 1 ]; then uninstall_all; else install_all; fi
