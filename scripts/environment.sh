# Sourced by quickstart and test: makes or reuses .venv in the repository; quick when nothing changed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python
not_built=llmctl/kernels/native/_not_built.txt  # hatch_build.py writes it

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

# Prints what an installation (core), or the extension in it (native), was made from; fails where .venv has no working Python.
fingerprint() {
    "$python" - "$1" "$root" "$(command -v "${CXX:-c++}" g++ clang++)" 2>/dev/null <<'END'
import hashlib, pathlib, sys
kind, root, compilers = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
native = root / "llmctl/kernels/native"
sources = [root / "hatch_build.py", *sorted(p for p in native.rglob("*") if p.suffix in (".cpp", ".hpp") or p.name == "CMakeLists.txt")]
hashed = hashlib.sha256(compilers.encode() if kind == "native" else b"")
for path in sources if kind == "native" else [root / "pyproject.toml"]:
    hashed.update(path.name.encode() + path.read_bytes())
print(hashed.hexdigest())
END
}

# is_made STAMP KIND: the stamp holds the fingerprint of what is there now.
is_made() { [ -f "$1" ] && [ "$(cat "$1")" = "$(fingerprint "$2")" ]; }

# ensure_environment [EXTRA]: the package and its dependencies (and those of EXTRA) are installed in .venv, its extension built
# from the sources that are there now.
ensure_environment() {
    local extra=${1:-} target=$root stamp native=$venv/.llmctl-native
    stamp=$venv/.llmctl-installed-${extra:-core}
    if ! is_made "$stamp" core; then
        make_venv || return 1
        if [ -n "$extra" ]; then target="$root[$extra]"; fi
        say "Installing $target (a few minutes the first time)"
        install_torch || return 1
        "$python" -m pip install -qq --disable-pip-version-check --editable "$target" || return 1
        fingerprint core >"$stamp"
    elif ! is_made "$native" native || ! has_outcome; then
        say "Building the native kernels"
        "$python" -m pip install -qq --disable-pip-version-check --no-deps --editable "$root" || return 1
    else
        return 0
    fi
    fingerprint native >"$native"
    tell_outcome
}

# Whether the extension, or the note that says why there is none, lies where the install put it.
has_outcome() {
    [ -f "$root/$not_built" ] || compgen -G "$root/llmctl/kernels/native/_native.*" >/dev/null
}

tell_outcome() {
    if [ -f "$root/$not_built" ]; then say "llmctl runs without its native kernels, slowly: $(cat "$root/$not_built")"; fi
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
