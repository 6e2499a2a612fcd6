#!/usr/bin/env bash
# Everything that is checked: lint, types and tests. Arguments go to pytest.
#
#   bash tests/run.sh
#   bash tests/run.sh tests/unit -k tokenizer
#
# VENV and PYTHON say where packages are installed, and with which Python: see tools/venv.sh.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/venv.sh
use_python requirements.txt requirements-dev.txt

failed=()

check() {
    run "${@:2}" || failed+=("$1")
}

check lint ruff check
check format ruff format --check
check types mypy
check tests python -m pytest "$@"

if ((${#failed[@]})); then
    echo "FAILED: ${failed[*]}"
    exit 1
fi
echo "PASSED: lint, format, types, tests"
