#!/usr/bin/env bash
# Make the environment with the test extras and run the suite. Arguments go to pytest: scripts/test.sh -k allocator
set -euo pipefail
EXTRAS=test
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$project"
python -m pytest -q "$@"
