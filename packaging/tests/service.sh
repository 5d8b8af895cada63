# SPDX-License-Identifier: MIT OR Apache-2.0
# The system's proxy of several users, as a service of a systemd that runs.
. /given/tests/common.sh
SOCKET=/run/pushgate/proxy

# A user's program that sends through the proxy: bench USER
bench() {
    setpriv --reuid "$1" --regid "$1" --init-groups env HOME="/home/$1" PUSHGATE_DEVICE=cpu timeout 120 \
        pushgate bench osu-bw -d D H -m 64:4K -i 20 -c --proxy process --proxy-socket $SOCKET >/tmp/bench 2>&1
}

status() {
    pushgate proxy --status --proxy-socket $SOCKET
}

dpkg -i /given/pushgate_*_amd64.deb >/tmp/installed
systemctl enable --now pushgate-proxy.socket
for user in alice bob mallory; do
    useradd --create-home "$user"
done
usermod -a -G pushgate alice
usermod -a -G pushgate bob

bench alice || fail "alice: $(cat /tmp/bench)"
[ "$(grep -c Pass /tmp/bench)" = 7 ] || fail "seven sizes, all right: $(cat /tmp/bench)"
systemctl is-active pushgate-proxy.service || fail "the service does not run: $(systemctl status pushgate-proxy.service)"
# It runs as a user of its own, which is neither root nor any user's.
service=$(systemctl show --property=MainPID --value pushgate-proxy.service)
[ "$(stat -c %u "/proc/$service")" -ge 61184 ] || fail "the service runs as user $(stat -c %u "/proc/$service")"
bench bob || fail "bob: $(cat /tmp/bench)"
status
if bench mallory; then
    fail "a user outside of the group was served"
fi
grep "may not connect to the proxy at $SOCKET" /tmp/bench || fail "mallory was not told why: $(cat /tmp/bench)"

# A proxy that dies is started again, and serves.
kill -9 "$service"
bench alice || fail "alice, after the proxy died: $(cat /tmp/bench)"
next=$(systemctl show --property=MainPID --value pushgate-proxy.service)
[ "$next" != "$service" ] && [ "$next" != 0 ] || fail "the service was not started again: $(systemctl status pushgate-proxy.service)"

# Without the package nothing of the service is left.
dpkg --purge pushgate
[ ! -e $SOCKET ] || fail "the socket is still there: $(systemctl status pushgate-proxy.socket)"
[ ! -e "/proc/$next" ] || fail "the proxy still runs"
[ -z "$(find /etc/systemd -name 'pushgate*')" ] || fail "links to units are left: $(find /etc/systemd -name 'pushgate*')"
