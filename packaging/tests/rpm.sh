# SPDX-License-Identifier: MIT OR Apache-2.0
. /given/tests/common.sh
rpm --initdb
state >/tmp/before
# The libraries come from Debian's packages, which rpm's records do not list.
rpm -qp --requires /given/pushgate-*.x86_64.rpm | grep 'GLIBC_2.28' || fail "the package asks for no glibc"
rpm -i --nodeps /given/pushgate-*.x86_64.rpm
rpm -V --nodeps pushgate || fail "rpm finds other files than it installed"
use /usr /usr/lib64
getent group pushgate
dkms status -m pushgate | grep added
rpm -e pushgate
clean /tmp/before
