# Sourced by quickstart and test: makes or reuses .venv in the repository; quick when nothing changed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python

say() { printf '%s\n' "$*" >&2; }

# Prints a Python that can make a virtual environment and that torch has wheels for; PYTHON names another to try first.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "No suitable Python: 3.10 to 3.14 with venv and pip is needed (on Debian: apt install python3-venv)." \
        "Set PYTHON to the interpreter to use."
    return 1
}

make_venv() {
    local interpreter
    if "$python" -m pip --version >/dev/null 2>&1; then return; fi
    interpreter=$(find_python) || return 1
    say "Making $venv with $interpreter"
    "$interpreter" -m venv --clear "$venv"
}

# Prints what the installation depends on; fails where .venv has no working Python.
fingerprint() {
    "$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' \
        "$root/pyproject.toml" 2>/dev/null
}

# ensure_environment [EXTRA]: the package and its dependencies (and those of EXTRA) are installed in .venv.
ensure_environment() {
    local extra=${1:-} target=$root stamp
    stamp=$venv/.llmctl-installed-${extra:-core}
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; then return; fi
    make_venv || return 1
    if [ -n "$extra" ]; then target="$root[$extra]"; fi
    say "Installing $target (a few minutes the first time)"
    install_torch || return 1
    "$python" -m pip install -qq --disable-pip-version-check --editable "$target" || return 1
    fingerprint >"$stamp"
}

# Installs torch first where a CPU build is better and has to be asked for; anything else is left to pip.
install_torch() {
    local requirement index
    requirement=$("$python" "$root/scripts/torch_source.py" requirement "$root/pyproject.toml") || return 1
    index=$("$python" "$root/scripts/torch_source.py" index "$requirement") || return 1
    if [ -z "$index" ]; then return; fi
    say "No NVIDIA device: taking a CPU build of torch from $index"
    "$python" -m pip install -qq --disable-pip-version-check --timeout 15 --retries 2 \
        --extra-index-url "$index" "$requirement" || say "That failed; torch comes from pip's usual source instead."
}
