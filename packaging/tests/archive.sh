# SPDX-License-Identifier: MIT OR Apache-2.0
. /given/tests/common.sh
mkdir /tmp/unpacked && tar -C /tmp/unpacked -xzf /given/pushgate-*-x86_64-linux.tar.gz
install=$(echo /tmp/unpacked/*/install.sh)
state >/tmp/before

for prefix in /usr/local /opt/push\ gate /root/.local; do
    "$install" --prefix "$prefix"
    # Over itself, as an update does.
    "$install" --prefix "$prefix"
    case "$prefix" in
    *\ *) "$prefix/bin/pushgate" --version ;;
    *) use "$prefix" "$prefix/lib" ;;
    esac
    for units in share/systemd/user lib/systemd/system; do
        grep -q "ExecStart=$prefix/bin/pushgate proxy" "$prefix/$units/pushgate-proxy.service" || fail "the unit"
    done
    # A user's file in a folder of the package stays, and so does the folder.
    echo mine >"$prefix/include/pushgate/mine.h"
    "$prefix/lib/pushgate/uninstall.sh"
    [ "$(find "$prefix" -newer "$install" -type f)" = "$prefix/include/pushgate/mine.h" ] || fail "not that file alone stayed"
    rm "$prefix/include/pushgate/mine.h"
    rmdir "$prefix/include/pushgate" "$prefix/include" "$prefix" 2>/dev/null || :
done
# Folders that were there before the test.
mkdir -p /usr/local/include /opt
clean /tmp/before

# A file of somebody else is not overwritten, and nothing is installed.
mkdir -p /tmp/other/bin && echo mine >/tmp/other/bin/pushgate
if "$install" --prefix /tmp/other 2>/tmp/said; then fail "a file was overwritten"; fi
grep -q "/tmp/other/bin/pushgate is there already" /tmp/said || fail "$(cat /tmp/said)"
[ "$(find /tmp/other -type f)" = /tmp/other/bin/pushgate ] || fail "something was installed"
rm -r /tmp/other

# A file that was changed since stays, and uninstall.sh says so.
"$install" --prefix /tmp/other
echo >>/tmp/other/include/pushgate/abi.h
if /tmp/other/lib/pushgate/uninstall.sh 2>/tmp/said; then fail "a changed file was no error"; fi
grep -q "abi.h stays" /tmp/said || fail "$(cat /tmp/said)"
[ "$(find /tmp/other -type f)" = /tmp/other/include/pushgate/abi.h ] || fail "something else stayed"
for wrong in "--prefix relative" "--prefix /" --prefix "--nonsense"; do
    # shellcheck disable=SC2086
    if "$install" $wrong >/dev/null 2>&1; then fail "$wrong was taken"; fi
done
