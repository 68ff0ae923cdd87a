# Sourced by quickstart.sh and test.sh: one environment for both, made where it is missing, brought up to date where it is not.
# An active virtual environment is used as it is; otherwise .venv in the project's folder. EXTRAS names optional dependencies.

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -x "$project/.venv/bin/python" ]; then
        python=""
        for candidate in python3 python3.13 python3.12 python3.11; do
            if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
                python=$candidate
                break
            fi
        done
        if [ -z "$python" ]; then
            echo "error: Python 3.11 or newer is needed and was not found" >&2
            exit 2
        fi
        echo "making $project/.venv with $($python --version)"
        "$python" -m venv "$project/.venv"
    fi
    . "$project/.venv/bin/activate"
fi

# Install again only when what is asked for has changed.
wanted="$(cksum < "$project/pyproject.toml") ${EXTRAS:-}"
stamp="$VIRTUAL_ENV/.installed-$(basename "$project" | tr -c 'A-Za-z0-9\n' _)${EXTRAS:+-$EXTRAS}"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || ! (cd / && python -c 'import dit' 2>/dev/null); then
    echo "installing the project and what it needs (PyTorch included; minutes, once)"
    (cd "$project" && python -m pip install --quiet --disable-pip-version-check --editable ".${EXTRAS:+[$EXTRAS]}" 2>&1 \
        | grep -v '^WARNING' || true)
    (cd / && python -c 'import dit, torch, torchvision') || { echo "error: the installation failed; see above" >&2; exit 1; }
    echo "$wanted" > "$stamp"
fi
