#!/usr/bin/env bash
# Builds the documentation as a site of HTML files in build/site: pages, and the API reference.
#
#   bash tools/docs.sh          # then open build/site/index.html
#   bash tools/docs.sh serve    # at http://127.0.0.1:8000, built again when a page changes
#
# A broken link, or a page that the navigation lacks, is an error. VENV and PYTHON: see tools/venv.sh.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/venv.sh
use_python requirements-docs.txt

export NO_MKDOCS_2_WARNING=1  # of mkdocs-material, about a later version of mkdocs
python -m mkdocs "${1:-build}" --quiet
