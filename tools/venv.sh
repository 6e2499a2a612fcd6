# Sourced by scripts. `use_python FILE…` puts a Python with these requirements files on PATH, and
# `run COMMAND` prints a command before it runs it. A file that ends in .lock holds versions with
# hashes, of everything but torch.
#
# That Python lives in the folder VENV if it is set, else in the active virtual environment, else in
# .venv. The folder is made if it is absent, with PYTHON or the first python3 that is new enough;
# packages are installed when the requirements have changed.

use_python() {
    local venv=${VENV:-${VIRTUAL_ENV:-.venv}} file installed
    if [[ ! -x $venv/bin/python ]]; then
        make_venv "$venv"
    fi
    venv=$(cd "$venv" && pwd)
    for file in "$@"; do
        installed=$venv/.installed-$(basename "$file")
        if ! cmp -s "$file" "$installed"; then
            echo "installing what $file lists; the first time, this takes minutes" >&2
            install_requirements "$venv/bin/python" "$file"
            cp "$file" "$installed"
        fi
    done
    export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
}

install_requirements() {
    local python=$1 file=$2
    if [[ $file != *.lock ]]; then
        run "$python" -m pip install --requirement "$file"
        return
    fi
    run "$python" -m pip install --requirement requirements-torch.txt
    run "$python" -m pip install --no-deps --require-hashes --requirement "$file"
}

make_venv() {
    local venv=$1 python
    python=$(new_enough_python)
    if ! run "$python" -m venv "$venv"; then
        rm -rf "$venv"
        echo "error: $python cannot make a virtual environment; the lines above say why" >&2
        return 1
    fi
}

new_enough_python() {
    local python candidates=(python3 python3.13 python3.12 python3.11 python3.10)
    if [[ -n ${PYTHON:-} ]]; then
        candidates=("$PYTHON")
    fi
    for python in "${candidates[@]}"; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then
            echo "$python"
            return
        fi
    done
    echo "error: Python 3.10 or newer is needed, and ${candidates[0]} says" \
        "\"$("${candidates[0]}" --version 2>&1)\"; name another: PYTHON=… bash ${0#"$PWD"/}" >&2
    return 1
}

# Printed so that it can be copied, a few flags to the line.
run() {
    local line='$' word quoted
    for word in "$@"; do
        quoted=$word
        if [[ -z $word || $word == *[!A-Za-z0-9_./:=,@%+-]* ]]; then
            quoted="'${word//\'/\'\\\'\'}'"
        fi
        if [[ $word == --* && ${#line} -gt 70 ]]; then
            printf '%s \\\n' "$line"
            line='   '
        fi
        line+=" $quoted"
    done >&2
    printf '%s\n' "$line" >&2
    "$@"
}
