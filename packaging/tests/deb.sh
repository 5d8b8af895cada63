# SPDX-License-Identifier: MIT OR Apache-2.0
. /given/tests/common.sh
state >/tmp/before
dpkg -i /given/pushgate_*_amd64.deb
use /usr /usr/lib/x86_64-linux-gnu
getent group pushgate
test -f /usr/lib/udev/rules.d/60-pushgate.rules && test -f /usr/lib/systemd/user/pushgate-proxy.service
test -f /usr/lib/systemd/system/pushgate-proxy.service && test -f /usr/lib/systemd/system/pushgate-proxy.socket
dkms status -m pushgate | grep added
dpkg --purge pushgate
clean /tmp/before
