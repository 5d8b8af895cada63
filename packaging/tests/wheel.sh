# SPDX-License-Identifier: MIT OR Apache-2.0
. /given/tests/common.sh
state >/tmp/before
python3 -m venv /tmp/venv
/tmp/venv/bin/pip install --quiet --no-index --disable-pip-version-check /given/pushgate-*.whl
NCCL_CALLER=/given/nccl-caller /tmp/venv/bin/python -m unittest discover -s /given/python-tests -v
/tmp/venv/bin/pip uninstall --quiet --yes pushgate
[ -z "$(find /tmp/venv -ipath '*pushgate*')" ] || fail "something is left behind: $(find /tmp/venv -ipath '*pushgate*')"
clean /tmp/before
