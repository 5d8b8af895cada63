#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Removes what install.sh has put below the prefix in which this script lies, and nothing else: files that were changed since, and
# folders in which something else lies, stay.
set -eu

own=$(cd "$(dirname "$0")" && pwd)
to=$(cd "$own/../.." && pwd)
[ -f "$own/installed" ] || {
    echo "uninstall.sh: $own/installed is not there: nothing is known to be installed" >&2
    exit 1
}
if dkms=$(dkms status -m pushgate 2>/dev/null) && [ -n "$dkms" ]; then
    echo "uninstall.sh: the kernel module stays; this removes it: dkms remove pushgate/@VERSION@ --all" >&2
fi
stays=0
while read -r kind sum path; do
    case "$kind" in
    f)
        [ -f "$to/$path" ] || continue
        now=$(sha256sum <"$to/$path")
        if [ "${now%% *}" = "$sum" ]; then
            rm -f "$to/$path"
        else
            echo "uninstall.sh: $to/$path stays: the file was changed since" >&2
            stays=1
        fi
        ;;
    l)
        if [ "$(readlink "$to/$path" || :)" = "$sum" ]; then
            rm -f "$to/$path"
        fi
        ;;
    esac
done <"$own/installed"
folders=$(sed -n 's/^d - //p' "$own/installed" | sed '1!G;h;$!d')
rm -f "$own/installed" "$own/part" "$own/uninstall.sh"
# The shell has read the rest of this script's lines, or reads them from the open file.
echo "$folders" | while read -r path; do
    [ -z "$path" ] || rmdir "$to/$path" 2>/dev/null || :
done
if [ "$(id -u)" = 0 ] && command -v ldconfig >/dev/null; then
    ldconfig
fi
exit "$stays"
