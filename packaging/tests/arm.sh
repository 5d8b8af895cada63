# SPDX-License-Identifier: MIT OR Apache-2.0
# The packages for 64-bit ARM, each installed, used and removed in a Debian of that architecture. Emulation is slow, so what is the
# same on every processor (manual, completions, programs in C) is left to the scripts of the kinds.
. /given/tests/common.sh
[ "$(uname -m)" = aarch64 ] || fail "this is $(uname -m)"

# Uses what is installed: works COMMAND PLUGIN
works() {
    "$1" --version
    # QEMU has no process_vm_readv, and that is a warning.
    timeout 300 "$1" doctor >/tmp/doctor 2>&1 || :
    grep -q ' warned, 0 failed, ' /tmp/doctor || fail "pushgate doctor: $(cat /tmp/doctor)"
    timeout 300 "$1" bench allreduce --ranks 2 --size 64K --iters 1 --device cpu --json >/tmp/bench 2>&1 ||
        fail "pushgate bench allreduce: $(cat /tmp/bench)"
    grep -q '"verified":true,"wrong":0,"dropped":0,"rnr":0' /tmp/bench || fail "the sums: $(cat /tmp/bench)"
    plugin "$2"
    rm /tmp/doctor
}

state >/tmp/before
dpkg -i /given/pushgate_*_arm64.deb
works pushgate /usr/lib/aarch64-linux-gnu/libnccl-net-pushgate.so
dkms status -m pushgate | grep added
dpkg --purge pushgate
clean /tmp/before

rpm --initdb
# Distributions with RPM have the folder.
mkdir /usr/lib64
state >/tmp/before
rpm -qp --requires /given/pushgate-*.aarch64.rpm | grep 'ld-linux-aarch64' || fail "the package asks for no loader of ARM"
rpm -i --nodeps /given/pushgate-*.aarch64.rpm
rpm -V --nodeps pushgate || fail "rpm finds other files than it installed"
works pushgate /usr/lib64/libnccl-net-pushgate.so
rpm -e pushgate
clean /tmp/before

# The archive, as its Containerfile has an image's builder install it.
tar -C /mnt --strip-components=1 -xzf /given/pushgate-*-aarch64-linux.tar.gz
sh -euc "$(sed -n 's/^RUN --mount=type=bind,source=.,target=.mnt //p' /mnt/Containerfile)"
works /usr/local/bin/pushgate "$(sed -n 's/^ENV NCCL_NET_PLUGIN=\([^ ]*\).*/\1/p' /mnt/Containerfile)"
/usr/local/lib/pushgate/uninstall.sh
rm -r /mnt/*
clean /tmp/before

python3 -m venv /tmp/venv
/tmp/venv/bin/pip install --quiet --no-index --disable-pip-version-check /given/pushgate-*.whl
(
    cd /given/python-tests
    # The bindings' tests that need no compiler.
    NCCL_CALLER=/given/nccl-caller /tmp/venv/bin/python -m unittest -v test_wheel.HostEnds \
        test_wheel.Files.test_no_rust_is_here \
        test_wheel.Files.test_all_files_are_there_and_the_command_runs \
        test_wheel.Files.test_the_glibc_that_the_name_says_is_enough \
        test_wheel.Module.test_nccls_caller_drives_the_plugin_that_env_names
)
timeout 300 /tmp/venv/bin/pushgate run -n 2 -- /tmp/venv/bin/python /given/tests/allreduce.py >/tmp/said || fail "allreduce.py: $(cat /tmp/said)"
sort /tmp/said
[ "$(grep -c 'the sums are right' /tmp/said)" = 2 ] || fail "two ranks, both right: $(cat /tmp/said)"
/tmp/venv/bin/pip uninstall --quiet --yes pushgate
[ -z "$(find /tmp/venv -ipath '*pushgate*')" ] || fail "something is left behind: $(find /tmp/venv -ipath '*pushgate*')"
clean /tmp/before
