#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Installs pushgate below a prefix. PREFIX/lib/pushgate/uninstall.sh removes what this script has installed, and nothing else.
set -eu
umask 022

usage() {
    echo "usage: install.sh [--prefix DIR] [--destdir DIR]"
    echo "  --prefix DIR   an absolute path, which programs are told [default: /usr/local]"
    echo "  --destdir DIR  a folder that stands for the root, for packages [default: the root itself]"
}

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

prefix=/usr/local
destdir=
while [ $# -gt 0 ]; do
    case "$1" in
    --prefix | --destdir)
        [ $# -ge 2 ] || fail "$1 takes a folder"
        case "$1" in
        --prefix) prefix=$2 ;;
        *) destdir=$2 ;;
        esac
        shift 2
        ;;
    --prefix=*) prefix=${1#*=}; shift ;;
    --destdir=*) destdir=${1#*=}; shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "unknown argument $1" ;;
    esac
done
case "$prefix" in
/) fail "--prefix /: expected a folder, as /usr/local" ;;
*[\|\&\\]*) fail "--prefix $prefix: expected a path without | & and \\" ;;
/*) prefix=${prefix%/} ;;
*) fail "--prefix $prefix: expected an absolute path" ;;
esac

here=$(cd "$(dirname "$0")" && pwd)
[ "$(uname -sm)" = "Linux @MACHINE@" ] || fail "these programs are for Linux on @ARCHITECTURE@, and this is $(uname -sm)"
"$here/files/bin/pushgate" --version >/dev/null ||
    fail "the program does not run here: it needs glibc 2.28 or later"

to=$destdir$prefix
own=$to/lib/pushgate
# An earlier version goes first, so that a file which is no more does not stay.
if [ -e "$own/installed" ]; then
    sh "$own/uninstall.sh"
fi
# Of a file that somebody else put there nothing is known: the file stays as it is.
while read -r kind sum path; do
    case "$kind" in f | l) [ ! -e "$to/$path" ] && [ ! -L "$to/$path" ] || fail "$to/$path is there already, and not by this script: remove it, or choose another --prefix" ;; esac
done <"$here/MANIFEST"

made=
# Makes a folder below the prefix, and notes each one that was not there.
folder() {
    if [ -d "$to/$1" ]; then
        return
    fi
    case "$1" in
    */*) folder "${1%/*}" ;;
    esac
    [ -d "$to/$1" ] || mkdir "$to/$1"
    note "d - $1"
}
note() {
    if [ -n "$made" ]; then
        echo "$1" >>"$own/installed"
    else
        early="$early$1
"
    fi
}
early=
if [ ! -d "$to" ]; then
    mkdir -p "$to"
    note "d - ."
fi
folder lib/pushgate
cp "$here/uninstall.sh" "$own/uninstall.sh"
chmod 755 "$own/uninstall.sh"
printf '%s' "$early" >"$own/installed"
made=yes
# What is there when something fails is removed again.
trap 'sh "$own/uninstall.sh"; fail "nothing was installed"' EXIT

# Each line is noted before its file is put there, and a file is put there whole.
while read -r kind sum path; do
    case "$path" in */*) folder "${path%/*}" ;; esac
    case "$kind" in
    f)
        case "$path" in
        */pushgate-proxy.service)
            sed "s|/usr/bin/pushgate|$prefix/bin/pushgate|" "$here/files/$path" >"$own/part"
            sum=$(sha256sum <"$own/part")
            sum=${sum%% *}
            ;;
        *) cp "$here/files/$path" "$own/part" ;;
        esac
        case "$path" in
        bin/*) chmod 755 "$own/part" ;;
        *) chmod 644 "$own/part" ;;
        esac
        note "f $sum $path"
        mv "$own/part" "$to/$path"
        ;;
    l)
        note "l $sum $path"
        ln -s "$sum" "$to/$path"
        ;;
    esac
done <"$here/MANIFEST"
trap - EXIT

if [ -z "$destdir" ] && [ "$(id -u)" = 0 ] && command -v ldconfig >/dev/null; then
    ldconfig
fi
version=$("$to/bin/pushgate" --version)
echo "$version is in $prefix; to remove it: $prefix/lib/pushgate/uninstall.sh"
echo "for NCCL:             export NCCL_NET_PLUGIN='$prefix/lib/libnccl-net-pushgate.so' NCCL_NET=pushgate NCCL_NET_PLUGIN_REF_COUNT=1"
echo "for NIXL:             the backend is in '$prefix/lib/pushgate/nixl' (docs/nixl.md)"
echo "for programs in C:    export PKG_CONFIG_PATH='$prefix/lib/pkgconfig' LD_LIBRARY_PATH='$prefix/lib'"
echo "for the kernel module, as root: groupadd --system pushgate; dkms install '$prefix/src/pushgate-@VERSION@'"
