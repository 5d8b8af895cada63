#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# Starts two ranks of this host, and ends them after two minutes at the latest: run.sh build/push
set -eu
exec timeout --kill-after=10 120 pushgate run -n 2 -- "${1:-build/push}"
